-- name: begin
-- First statement of every transaction. The guards are local to the transaction, so that they hold behind a
-- transaction pooler; the rest says whether this server and schema can carry the job.
select set_config('TimeZone', 'UTC', true),
       set_config('DateStyle', 'ISO, MDY', true),
       set_config('application_name', %(application_name)s, true),
       set_config('statement_timeout', %(statement_timeout)s, true),
       set_config('lock_timeout', %(lock_timeout)s, true),
       set_config('idle_in_transaction_session_timeout', %(idle_timeout)s, true),
       transaction_timestamp() as now,
       extract(epoch from clock_timestamp())::float8 as clock,
       pg_is_in_recovery() as in_recovery,
       current_setting('transaction_read_only') = 'on' as read_only,
       (select array_agg(s.version_num::text) from crm.crmctl_schema_version s) as revisions,
       (select c.minimum_version from crm.crmctl_compatibility c where c.part = 'bookkeeping') as minimum_version
