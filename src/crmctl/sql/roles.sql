-- The roles of `crmctl db roles`, as the catalogue has them. Names of tables are `schema.table`.

-- name: take_lock
-- Two `db roles` at once take turns. Released with the transaction.
select pg_advisory_xact_lock(%(lock)s)

-- name: roles
-- Which of the roles exist.
select r.rolname::text as role
from pg_roles r
where r.rolname = any(%(roles)s::text[])
order by r.rolname

-- name: tables
-- Which of the tables exist, and every table of our schema, each with its columns.
select n.nspname || '.' || c.relname as table_name,
       array(
           select a.attname::text
           from pg_attribute a
           where a.attrelid = c.oid
               and a.attnum > 0
               and not a.attisdropped
       ) as columns
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p', 'v')
    and (n.nspname = %(schema)s or n.nspname || '.' || c.relname = any(%(tables)s::text[]))
order by 1

-- name: granted
-- What is granted to the roles themselves: on tables, on columns ('' stands for none), and on the schema (no table).
select r.rolname::text as role, g.table_name, g.privilege, g.column_name
from (
    select a.grantee, n.nspname || '.' || c.relname as table_name, a.privilege_type as privilege, '' as column_name
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    cross join lateral aclexplode(c.relacl) a
    where c.relkind in ('r', 'p', 'v')
        and (n.nspname = %(schema)s or n.nspname || '.' || c.relname = any(%(tables)s::text[]))
    union all
    select a.grantee, n.nspname || '.' || c.relname, a.privilege_type, t.attname::text
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    join pg_attribute t on t.attrelid = c.oid and t.attnum > 0 and not t.attisdropped
    cross join lateral aclexplode(t.attacl) a
    where c.relkind in ('r', 'p', 'v')
        and (n.nspname = %(schema)s or n.nspname || '.' || c.relname = any(%(tables)s::text[]))
    union all
    select a.grantee, '', a.privilege_type, ''
    from pg_namespace n
    cross join lateral aclexplode(n.nspacl) a
    where n.nspname = %(schema)s
) g
join pg_roles r on r.oid = g.grantee
where r.rolname = any(%(roles)s::text[])

-- name: lacking
-- Which of the privileges the connected role does not hold, whoever it has them from. Arrays in parallel; a column ''
-- stands for the whole table. Tables and columns that are not there are another check's business.
select u.table_name, u.privilege, u.column_name
from unnest(%(tables)s::text[], %(privileges)s::text[], %(columns)s::text[]) as u (table_name, privilege, column_name)
join pg_namespace n on n.nspname = split_part(u.table_name, '.', 1)
join pg_class c on c.relnamespace = n.oid and c.relname = split_part(u.table_name, '.', 2)
left join pg_attribute a on a.attrelid = c.oid and a.attname = u.column_name and not a.attisdropped
where not case
    when u.column_name = '' then has_table_privilege(c.oid, u.privilege)
    when a.attnum is null then true
    else has_column_privilege(c.oid, a.attnum, u.privilege)
end

-- name: schema_usage
-- The connected role, and whether it may use our schema; null where there is no such schema.
select current_user::text as role,
       (select has_schema_privilege(n.oid, 'USAGE') from pg_namespace n where n.nspname = %(schema)s) as usage
