-- The ledger of dead letters. `topic_id` is the dead-letter topic's; arrays of one statement are parallel.

-- name: floors
-- Where the first letter that is not closed stands, by partition, from the first offset that the topic still holds.
-- Walks the primary key along the closed prefix.
select p.partition,
       coalesce(
           (
               select r."offset" + 1
               from crm.dlq_resolutions r
               where r.topic_id = %(topic_id)s
                   and r.partition = p.partition
                   and r."offset" >= p.first
                   and r.resolution <> 'failed'
                   and not exists (
                       select
                       from crm.dlq_resolutions n
                       where n.topic_id = r.topic_id
                           and n.partition = r.partition
                           and n."offset" = r."offset" + 1
                           and n.resolution <> 'failed'
                   )
                   and exists (
                       select
                       from crm.dlq_resolutions f
                       where f.topic_id = r.topic_id
                           and f.partition = r.partition
                           and f."offset" = p.first
                           and f.resolution <> 'failed'
                   )
               order by r."offset"
               limit 1
           ),
           p.first
       ) as floor
from unnest(%(partitions)s::integer[], %(first)s::bigint[]) as p (partition, first)

-- name: rows
-- The ledger's rows of a run of letters in each partition. A range of the primary key; `offset 0` keeps the planner from
-- a join that reads the whole ledger while its statistics are old.
select r.*
from unnest(%(partitions)s::integer[], %(first)s::bigint[], %(last)s::bigint[]) as u (partition, first, last)
cross join lateral (
    select d.partition, d."offset", d.resolution, d.attempts, d.code, d.reason, d.resolved_by, d.run_id, d.resolved_at
    from crm.dlq_resolutions d
    where d.topic_id = %(topic_id)s
        and d.partition = u.partition
        and d."offset" between u.first and u.last
    order by d."offset"
    offset 0
) r

-- name: closed_sources
-- Which source records are done by any of their letters; that one was lost says nothing of the others. By
-- ix_dlq_resolutions_source, one look each.
select r.*
from unnest(%(topic_ids)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[]) as u (topic_id, partition, position)
cross join lateral (
    select d.source_topic_id, d.source_partition, d.source_offset, d.resolution, d.reason, d.resolved_by, d.run_id,
           d.resolved_at
    from crm.dlq_resolutions d
    where d.source_topic_id = u.topic_id
        and d.source_partition = u.partition
        and d.source_offset = u.position
        and d.resolution not in ('failed', 'lost')
    limit 1
) r

-- name: record
-- What became of letters. A row that is closed stays as it is.
insert into crm.dlq_resolutions as d
    (topic_id, partition, "offset", source_topic_id, source_partition, source_offset, resolution, code, reason,
     attempts, resolved_by, run_id)
select %(topic_id)s, u.partition, u.position, u.source_topic_id, u.source_partition, u.source_offset, u.resolution,
       u.code, u.reason, u.attempts, %(resolved_by)s, %(run_id)s
from unnest(
    %(partitions)s::integer[], %(offsets)s::bigint[], %(source_topic_ids)s::text[], %(source_partitions)s::integer[],
    %(source_offsets)s::bigint[], %(resolutions)s::text[], %(codes)s::text[], %(reasons)s::text[],
    %(attempts)s::integer[]
) as u (partition, position, source_topic_id, source_partition, source_offset, resolution, code, reason, attempts)
on conflict (topic_id, partition, "offset") do update
set resolution = excluded.resolution,
    code = excluded.code,
    reason = excluded.reason,
    attempts = excluded.attempts,
    resolved_by = excluded.resolved_by,
    run_id = excluded.run_id,
    resolved_at = now()
where d.resolution = 'failed'

-- name: lost_failures
-- Failed letters that the topic holds no more, unless another letter closed their source: a part of the two below.
from crm.dlq_resolutions r
left join unnest(%(partitions)s::integer[], %(first)s::bigint[]) as p (partition, first)
    on p.partition = r.partition
where r.resolution = 'failed'
    and (r.topic_id <> %(topic_id)s or r."offset" < p.first)
    and not exists (
        select
        from crm.dlq_resolutions c
        where c.source_topic_id = r.source_topic_id
            and c.source_partition = r.source_partition
            and c.source_offset = r.source_offset
            and c.resolution not in ('failed', 'lost')
    )

-- name: lost
-- Letters that are open and that the topic holds no more: those before its first offsets that have no row, whose source
-- nobody knows any more; and those that failed a replay, there or in an earlier topic of this name, unless another letter
-- closed their source. By primary key, ix_dlq_resolutions_failed and ix_dlq_resolutions_source.
select (
    select coalesce(sum(p.first), 0)
    from unnest(%(partitions)s::integer[], %(first)s::bigint[]) as p (partition, first)
) - (
    select count(*)
    from unnest(%(partitions)s::integer[], %(first)s::bigint[]) as p (partition, first)
    join crm.dlq_resolutions r
        on r.topic_id = %(topic_id)s
        and r.partition = p.partition
        and r."offset" < p.first
) + (
    select count(*)
    {lost_failures}
) as lost_count

-- name: acknowledge_failed
-- Up to so many of the lost letters that have a row: `lost` from now on, with who says so and why.
with gone as (
    select r.topic_id, r.partition, r."offset"
    {lost_failures}
    limit %(limit)s
    for update of r
),
acknowledged as (
    update crm.dlq_resolutions d
    set resolution = 'lost',
        reason = %(reason)s,
        resolved_by = %(resolved_by)s,
        run_id = %(run_id)s,
        resolved_at = now()
    from gone g
    where d.topic_id = g.topic_id
        and d.partition = g.partition
        and d."offset" = g."offset"
    returning d."offset"
)
select count(*) as acknowledged_count
from acknowledged

-- name: acknowledge_unseen
-- The lost letters of a run of offsets that have no row get one.
with acknowledged as (
    insert into crm.dlq_resolutions as d (topic_id, partition, "offset", resolution, reason, resolved_by, run_id)
    select %(topic_id)s, %(partition)s, u.position, 'lost', %(reason)s, %(resolved_by)s, %(run_id)s
    from generate_series(%(from)s::bigint, %(to)s::bigint - 1) as u (position)
    on conflict (topic_id, partition, "offset") do nothing
    returning d."offset"
)
select count(*) as acknowledged_count
from acknowledged

-- name: closed_count
-- How many letters of a topic are closed at these places or later; see jobs.dead_letters.closed_count. A range of the
-- primary key for each partition.
select coalesce(sum(r.closed_count), 0) as closed_count
from unnest(%(partitions)s::integer[], %(floors)s::bigint[]) as p (partition, floor)
cross join lateral (
    select count(*) as closed_count
    from crm.dlq_resolutions d
    where d.topic_id = %(topic_id)s
        and d.partition = p.partition
        and d."offset" >= p.floor
        and d.resolution <> 'failed'
) r

-- name: deal
-- The deal of a letter as it is now.
select d.id, d.tenant_id, d.status, d.chat_status, d.deleted_at, d.updated_at, p.topic_id, p.partition, p."offset"
from crm.deals d
left join crm.deal_chat_positions p on p.deal_id = d.id
where d.id = %(deal_id)s::uuid
