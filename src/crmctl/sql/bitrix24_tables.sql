-- How bitrix24-php-lib's tables are found.

-- name: table
-- A table by its name (with or without a schema): the quoted name with its schema, and its columns. Null: none such.
select case when c.oid is not null then format('%%I.%%I', n.nspname, c.relname) end as name,
       array(
           select a.attname::text
           from pg_attribute a
           where a.attrelid = c.oid
               and a.attnum > 0
               and not a.attisdropped
       ) as columns
from (select to_regclass(%(table)s) as oid) as named
left join pg_class c
    on c.oid = named.oid
    and c.relkind in ('r', 'p', 'v')
left join pg_namespace n on n.oid = c.relnamespace

-- name: time_zone
-- Fails with invalid_parameter_value where PostgreSQL does not know the zone.
select now() at time zone %(zone)s as local
