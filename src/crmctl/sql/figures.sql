-- The figures of `crmctl metrics serve`, `status` and `doctor`. Of bookings they are written once and filled in for each
-- phase; {defect} is the expression of sql/expire_bookings.sql.

-- name: due
-- Bookings of one phase that are due and may expire: poison is counted apart. Walks {index}.
select count(*) as due_count,
       count(*) filter (where b.{deadline} < now() - %(overdue_after)s::interval) as overdue_count,
       coalesce(extract(epoch from now() - min(b.{deadline})), 0)::float8 as oldest_due_seconds
from crm.bookings b
where b.status in ({statuses})
    and b.{deadline} < now()
    and {defect} is null

-- name: never_expire
-- Active bookings of one phase whose deadline is missing or infinite. Probes {index}.
select count(*) as never_expire_count
from crm.bookings b
where b.status in ({statuses})
    and (b.{deadline} is null or b.{deadline} = 'infinity' or b.{deadline} = '-infinity')

-- name: poison
-- What the last run of the expiry that left a record could not expire. By ix_job_runs_job_finished_at and primary key.
select coalesce(sum((r.counts ->> 'poison_count')::bigint), 0)::bigint as poison_count
from crm.job_runs r
where r.run_id = (
    select l.run_id
    from crm.job_runs l
    where l.job = 'expire-bookings' and l.outcome = 'committed'
    order by l.finished_at desc
    limit 1
)

-- name: outbox
-- What is not published, from the partial indexes of pending and of held rows. The oldest is the first by position.
select (
           select count(*) from crm.outbox_messages o where o.published_at is null and o.next_attempt_at is null
       ) as pending_count,
       (
           select count(*) from crm.outbox_messages o where o.published_at is null and o.next_attempt_at is not null
       ) as held_count,
       coalesce(extract(epoch from now() - least(
           (
               select o.created_at
               from crm.outbox_messages o
               where o.published_at is null and o.next_attempt_at is null
               order by o.position
               limit 1
           ),
           (
               select min(o.created_at)
               from crm.outbox_messages o
               where o.published_at is null and o.next_attempt_at is not null
           )
       )), 0)::float8 as oldest_unpublished_seconds

-- name: prunable
-- The age of the oldest run record that is not the last success of its job, or 0: prune deletes it one day. Probes
-- ix_job_runs_job_finished_at.
select coalesce(extract(epoch from now() - min(o.finished_at)), 0)::float8 as oldest_prunable_seconds
from unnest(%(jobs)s::text[]) as u (job)
cross join lateral (
    select r.finished_at
    from crm.job_runs r
    where r.job = u.job
    order by r.finished_at
    limit 1
) o
where exists (
    select
    from crm.job_runs l
    where l.job = u.job and l.outcome = 'committed' and l.finished_at > o.finished_at
)

-- name: deferred
-- Events that wait for their deal. By sequential scan: the table is small.
select count(*) as deferred_count,
       coalesce(extract(epoch from now() - min(m.deferred_at)), 0)::float8 as oldest_deferred_seconds
from crm.deferred_messages m
