-- name: revisions
-- The revisions that this database is at.
select s.version_num::text as revision
from crm.crmctl_schema_version s
order by s.version_num
