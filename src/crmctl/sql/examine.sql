-- name: begin
-- First statement of an examination: its guards, and what kind of session this is.
select set_config('TimeZone', 'UTC', true),
       set_config('DateStyle', 'ISO, MDY', true),
       set_config('statement_timeout', %(statement_timeout)s, true),
       set_config('lock_timeout', %(lock_timeout)s, true),
       transaction_timestamp() as now,
       extract(epoch from clock_timestamp())::float8 as clock,
       pg_is_in_recovery() as in_recovery,
       current_setting('transaction_read_only') = 'on' as read_only,
       current_setting('server_version') as version,
       current_user::text as role

-- name: has_revisions
-- Whether there is a table of revisions at all.
select exists (
    select
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = %(schema)s and c.relname = %(table)s
) as found

-- name: revisions
-- The revisions that this database is at, and the oldest crmctl that it accepts.
select (select array_agg(s.version_num::text) from crm.crmctl_schema_version s) as revisions,
       (select c.minimum_version from crm.crmctl_compatibility c where c.part = 'bookkeeping') as minimum_version

-- name: memberships
-- Which of the roles the connected one is, or inherits from; a superuser's is every role.
select r.rolname::text as role
from pg_roles r
where r.rolname = any(%(roles)s::text[])
    and pg_has_role(r.oid, 'USAGE')
