-- name: record_batch
-- One row for a batch that did something, in the batch's own transaction.
insert into crm.job_runs
    (run_id, batch, job, actor, as_of, started_at, finished_at, outcome, counts, version, host)
values
    (%(run_id)s, %(batch)s, %(job)s, %(actor)s, %(as_of)s, now(), clock_timestamp(), 'committed', %(counts)s, %(version)s, %(host)s)

-- name: record_idle
-- A sign of life: one row for a batch with nothing to do, unless the job's last success is younger than the interval,
-- or there is none at all. Two probes of ix_job_runs_job_finished_at.
insert into crm.job_runs
    (run_id, batch, job, actor, as_of, started_at, finished_at, outcome, version, host)
select %(run_id)s, %(batch)s, %(job)s, %(actor)s, %(as_of)s, now(), clock_timestamp(), 'committed', %(version)s, %(host)s
where exists (
        select
        from crm.job_runs r
        where r.job = %(job)s and r.outcome = 'committed'
    )
    and not exists (
        select
        from crm.job_runs r
        where r.job = %(job)s and r.outcome = 'committed' and r.finished_at > now() - %(interval)s::interval
    )
returning run_id

-- name: record_failure
-- One row for a run that rolled back, in a transaction of its own.
insert into crm.job_runs
    (run_id, batch, job, actor, as_of, started_at, finished_at, outcome, error_code, error, version, host)
values
    (%(run_id)s, %(batch)s, %(job)s, %(actor)s, %(as_of)s, %(started_at)s, clock_timestamp(), 'failed', %(error_code)s, %(error)s, %(version)s, %(host)s)
on conflict (run_id, batch) do nothing

-- name: list
-- Runs, the latest first, each with the sums of its batches' figures. Reads the whole table, which `crmctl prune` keeps
-- small: it is for people, not for jobs.
with latest as (
    select r.run_id, max(r.finished_at) as finished_at
    from crm.job_runs r
    where (%(job)s::text is null or r.job = %(job)s::text)
    group by r.run_id
    having not %(failed)s::boolean or bool_or(r.outcome = 'failed')
    order by 2 desc, 1
    limit %(limit)s
)
select r.run_id,
       min(r.job) as job,
       min(r.actor) as actor,
       case when bool_or(r.outcome = 'failed') then 'failed' else 'committed' end as outcome,
       count(*) filter (where r.outcome = 'committed') as batches,
       min(r.started_at) as started_at,
       l.finished_at,
       coalesce(
           (
               select jsonb_object_agg(s.name, s.total order by s.name)
               from (
                   select c.key as name, sum(c.value::bigint) as total
                   from crm.job_runs b
                   cross join lateral jsonb_each_text(b.counts) c
                   where b.run_id = r.run_id
                   group by c.key
                   having sum(c.value::bigint) <> 0
               ) s
           ),
           '{}'
       ) as counts,
       max(r.error_code) as error_code,
       max(r.error) as error
from latest l
join crm.job_runs r on r.run_id = l.run_id
group by r.run_id, l.finished_at
order by l.finished_at desc, r.run_id

-- name: show
-- The batches of one run, in their order. By primary key.
select r.batch, r.job, r.actor, r.as_of, r.started_at, r.finished_at, r.outcome, r.counts, r.error_code, r.error,
       r.version, r.host
from crm.job_runs r
where r.run_id = %(run_id)s
order by r.batch
