-- name: record_batch
-- One row for a batch that did something, in the batch's own transaction.
insert into crm.job_runs
    (run_id, batch, job, actor, as_of, started_at, finished_at, outcome, counts, version, host)
values
    (%(run_id)s, %(batch)s, %(job)s, %(actor)s, %(as_of)s, now(), clock_timestamp(), 'committed', %(counts)s, %(version)s, %(host)s)

-- name: record_failure
-- One row for a run that rolled back, in a transaction of its own.
insert into crm.job_runs
    (run_id, batch, job, actor, as_of, started_at, finished_at, outcome, error_code, error, version, host)
values
    (%(run_id)s, %(batch)s, %(job)s, %(actor)s, %(as_of)s, %(started_at)s, clock_timestamp(), 'failed', %(error_code)s, %(error)s, %(version)s, %(host)s)
on conflict (run_id, batch) do nothing
