-- The statements of `crmctl prune`. Each deletes up to batch_size rows that are older than the cutoff.

-- name: prepare
-- Outbox rows are walked by their place in the table, page by page, once per run: no index of published rows is needed,
-- and what an earlier batch deleted is not read again.
set local enable_seqscan = off;
set local enable_bitmapscan = off;
set local jit = off

-- name: take_lock
-- One prune at a time per database; a second one leaves at once. Released with the transaction.
select pg_try_advisory_xact_lock(%(lock)s) as taken

-- name: outbox
-- Messages that were published before the cutoff. Walks the table from the floor by a TID range scan, deletes by primary
-- key. `reached`: the place of the last one; null when there were fewer than the batch's size.
with picked as materialized (
    select o.id, o.ctid as place
    from crm.outbox_messages o
    where o.ctid > %(floor)s::tid
        and o.published_at < %(cutoff)s::timestamptz
    limit %(batch_size)s
),
deleted as (
    delete from crm.outbox_messages o
    where o.id = any(array(select p.id from picked p))
        and o.published_at < %(cutoff)s::timestamptz
    returning o.id
)
select (select count(*) from deleted) as deleted_count,
       case when (select count(*) from picked) = %(batch_size)s then (select max(p.place)::text from picked p) end as reached

-- name: marks
-- The consumer's marks. Walks ix_processed_messages_processed_at, deletes by primary key.
with deleted as (
    delete from crm.processed_messages m
    where m.key = any(
        array(
            select p.key
            from crm.processed_messages p
            where p.processed_at < %(cutoff)s::timestamptz
            order by p.processed_at
            limit %(batch_size)s
        )
    )
    returning m.key
)
select count(*) as deleted_count
from deleted

-- name: runs
-- Run records, but of each job its last success, however old. Walks ix_job_runs_job_finished_at job by job.
with recursive jobs as (
    (select r.job from crm.job_runs r order by r.job limit 1)
    union all
    select (select r.job from crm.job_runs r where r.job > j.job order by r.job limit 1)
    from jobs j
    where j.job is not null
),
kept as (
    select k.run_id, k.batch
    from jobs j
    cross join lateral (
        select r.run_id, r.batch
        from crm.job_runs r
        where r.job = j.job and r.outcome = 'committed'
        order by r.finished_at desc
        limit 1
    ) k
    where j.job is not null
),
picked as materialized (
    select o.run_id, o.batch
    from jobs j
    cross join lateral (
        select r.run_id, r.batch
        from crm.job_runs r
        where r.job = j.job
            and r.finished_at < %(cutoff)s::timestamptz
            and (r.run_id, r.batch) not in (select k.run_id, k.batch from kept k)
        order by r.finished_at
        limit %(batch_size)s
    ) o
    where j.job is not null
    limit %(batch_size)s
),
deleted as (
    delete from crm.job_runs r
    using picked p
    where r.run_id = p.run_id
        and r.batch = p.batch
    returning r.run_id
)
select count(*) as deleted_count
from deleted
