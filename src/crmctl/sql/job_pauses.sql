-- name: find
-- The pause of one job, if there is one. By primary key.
select p.job, p.reason, p.paused_by, p.paused_at
from crm.job_pauses p
where p.job = %(job)s

-- name: pause
-- Pauses jobs; returns those that were not paused yet. By primary key.
insert into crm.job_pauses (job, reason, paused_by)
select u.job, %(reason)s, %(paused_by)s
from unnest(%(jobs)s::text[]) as u (job)
on conflict (job) do nothing
returning job

-- name: resume
-- Ends pauses; returns the jobs that had one. By primary key.
delete from crm.job_pauses p
where p.job = any(%(jobs)s::text[])
returning p.job

-- name: list
-- Every job that crmctl knows, its pause, and when it last did something and last failed. Walks
-- ix_job_runs_job_finished_at backwards, from each job's newest record.
select u.job,
       p.job is not null as paused,
       p.paused_by,
       p.paused_at,
       p.reason as pause_reason,
       s.finished_at as last_success_at,
       f.finished_at as last_failure_at
from unnest(%(jobs)s::text[]) with ordinality as u (job, place)
left join crm.job_pauses p on p.job = u.job
left join lateral (
    select r.finished_at
    from crm.job_runs r
    where r.job = u.job and r.outcome = 'committed'
    order by r.finished_at desc
    limit 1
) s on true
left join lateral (
    select r.finished_at
    from crm.job_runs r
    where r.job = u.job and r.outcome = 'failed'
    order by r.finished_at desc
    limit 1
) f on true
order by u.place
