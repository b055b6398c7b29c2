-- The statements of one batch of `crmctl chat-status consume`. Arrays of one statement are parallel.

-- name: prepare
-- Deferred constraints would fail at the commit, where no deal could be blamed any more.
set constraints all immediate

-- name: lock_partitions
-- Keeps a zombie owner of a partition and its successor apart, until the end of the transaction. Ascending.
select pg_advisory_xact_lock(k.key)
from (select u.key from unnest(%(keys)s::bigint[]) as u (key) order by u.key) k

-- name: due_deals
-- The deals whose deferred events are due in our partitions, or in those that no longer exist where we own
-- partition 0 (`orphans`). Walks ix_deferred_messages_next_attempt_at.
select distinct d.deal_id::text as deal_id
from (
    select m.deal_id, m.topic_id, m.partition
    from crm.deferred_messages m
    where m.next_attempt_at <= %(now)s::timestamptz
        and (
            (m.topic_id = %(topic_id)s::text and m.partition = any(%(partitions)s::integer[]))
            or (
                %(orphans)s::boolean
                and (m.topic_id <> %(topic_id)s::text or m.partition >= %(partition_count)s::integer)
            )
        )
    order by m.next_attempt_at
    limit %(limit)s
) d

-- name: lock_deals
-- The deals of the batch, locked in id order and read as they are now. By primary key.
select d.id::text as id,
       d.tenant_id::text as tenant_id,
       d.chat_status,
       d.deleted_at is not null as deleted
from crm.deals d
where d.id = any(%(deal_ids)s::uuid[])
order by d.id
for no key update

-- name: read_deals
-- The same without locks, for a look at what a replay would do. By primary key.
select d.id::text as id,
       d.tenant_id::text as tenant_id,
       d.chat_status,
       d.deleted_at is not null as deleted
from crm.deals d
where d.id = any(%(deal_ids)s::uuid[])

-- name: positions
-- The source positions of the events that the statuses are from; a statement of its own, so that it sees what the last holder of
-- the locks committed. By primary key.
select p.deal_id::text as deal_id, p.topic_id, p.partition, p."offset", p.changed_at
from crm.deal_chat_positions p
where p.deal_id = any(%(deal_ids)s::uuid[])

-- name: marks
-- Which of the batch's messages are done: marked, or (`waiting`) in line for their deal. By primary key and
-- ix_deferred_messages_message.
select substr(m.key, %(prefix_length)s::integer + 1) as message_id
from crm.processed_messages m
where m.key = any(%(keys)s::text[])
union all
select d.message_id::text
from crm.deferred_messages d
where %(waiting)s::boolean
    and d.message_id = any(%(message_ids)s::uuid[])

-- name: deferred
-- Everything that waits for one of the deals, and the size of its record. Uses ix_deferred_messages_deal.
select m.topic_id, m.partition, m."offset", m.value, m.attempts, m.next_attempt_at,
       length(m.value) + coalesce(length(m.key), 0) + length(m.headers::text) as size
from crm.deferred_messages m
where m.deal_id = any(%(deal_ids)s::uuid[])

-- name: deferred_records
-- Deferred events as they were in their topic. By primary key.
select m.topic_id, m.partition, m."offset", m.topic, m.key, m.value, m.headers, m.timestamp_ms
from crm.deferred_messages m
join unnest(%(topic_ids)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[])
    as u (topic_id, partition, position)
    on m.topic_id = u.topic_id
    and m.partition = u.partition
    and m."offset" = u.position

-- name: write
-- The whole batch in one statement: the projection (that column and updated_at, never the version), the positions,
-- the marks, the deferred events that are done, and those that wait.
with deals as (
    update crm.deals d
    set chat_status = u.chat_status,
        updated_at = greatest(d.updated_at, now())
    from unnest(%(deal_ids)s::uuid[], %(chat_statuses)s::text[]) as u (id, chat_status)
    where d.id = u.id
        and d.chat_status is distinct from u.chat_status
    returning d.id
),
positions as (
    insert into crm.deal_chat_positions (deal_id, topic_id, partition, "offset", changed_at)
    select u.deal_id, u.topic_id, u.partition, u.position, u.changed_at
    from unnest(
        %(deal_ids)s::uuid[], %(topic_ids)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
        %(changed_ats)s::bigint[]
    ) as u (deal_id, topic_id, partition, position, changed_at)
    on conflict (deal_id) do update
    set topic_id = excluded.topic_id,
        partition = excluded.partition,
        "offset" = excluded."offset",
        changed_at = excluded.changed_at,
        updated_at = now()
    returning deal_id
),
marks as (
    insert into crm.processed_messages (key)
    select u.key
    from unnest(%(mark_keys)s::text[]) as u (key)
    on conflict (key) do nothing
    returning key
),
done as (
    delete from crm.deferred_messages m
    using unnest(%(done_topic_ids)s::text[], %(done_partitions)s::integer[], %(done_offsets)s::bigint[])
        as u (topic_id, partition, position)
    where m.topic_id = u.topic_id
        and m.partition = u.partition
        and m."offset" = u.position
    returning m.message_id
)
select (select count(*) from deals) as deal_count,
       (select count(*) from marks) as mark_count,
       (select count(*) from done) as done_count

-- name: defer
-- Events whose deal is missing: the raw record, and when it is tried again.
insert into crm.deferred_messages
    (topic_id, partition, "offset", topic, message_id, deal_id, key, value, headers, timestamp_ms, attempts,
     next_attempt_at)
select u.topic_id, u.partition, u.position, %(topic)s, u.message_id, u.deal_id, u.key, u.value, u.headers,
       u.timestamp_ms, u.attempts, u.next_attempt_at
from unnest(
    %(topic_ids)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[], %(message_ids)s::uuid[],
    %(deal_ids)s::uuid[], %(keys)s::bytea[], %(values)s::bytea[], %(headers)s::jsonb[], %(timestamps)s::bigint[],
    %(attempts)s::integer[], %(next_attempts_at)s::timestamptz[]
) as u (topic_id, partition, position, message_id, deal_id, key, value, headers, timestamp_ms, attempts, next_attempt_at)

-- name: postpone
-- Events whose deal is still missing: when they are tried again. By primary key.
update crm.deferred_messages m
set attempts = u.attempts,
    next_attempt_at = u.next_attempt_at
from unnest(
    %(topic_ids)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[], %(attempts)s::integer[],
    %(next_attempts_at)s::timestamptz[]
) as u (topic_id, partition, position, attempts, next_attempt_at)
where m.topic_id = u.topic_id
    and m.partition = u.partition
    and m."offset" = u.position
