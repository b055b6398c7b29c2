-- name: revisions
-- The revisions that this database is at.
select s.version_num::text as revision
from crm.crmctl_schema_version s
order by s.version_num

-- name: columns
-- The columns of the core tables, with the type's name without its length.
select c.relname::text as "table",
       a.attname::text as name,
       format_type(a.atttypid, null) as type,
       not a.attnotnull or a.atthasdef or a.attidentity <> '' as filled
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
where n.nspname = %(schema)s
    and c.relkind in ('r', 'p', 'v')
    and c.relname = any(%(tables)s::text[])
order by c.relname, a.attnum

-- name: indexes
-- The valid indexes of the core tables: key columns in their order, and the predicate as PostgreSQL prints it.
select c.relname::text as "table",
       array(
           select pg_get_indexdef(i.indexrelid, k.number, true)
           from generate_series(1, i.indnkeyatts) as k (number)
           order by k.number
       ) as key,
       pg_get_expr(i.indpred, i.indrelid) as predicate,
       i.indisunique as unique
from pg_index i
join pg_class c on c.oid = i.indrelid
join pg_namespace n on n.oid = c.relnamespace
where n.nspname = %(schema)s
    and c.relname = any(%(tables)s::text[])
    and i.indisvalid
