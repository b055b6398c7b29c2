-- name: take_lock
-- One relay at a time per database; a second one leaves at once. Released with the transaction.
select pg_try_advisory_xact_lock(%(lock)s) as taken

-- name: select_retries
-- Held aggregates whose pause is over: of each, the first unpublished row only. Walks
-- ix_outbox_messages_next_attempt_at and probes ix_outbox_messages_held.
select o.id::text as id, o.aggregate_id, o.topic, o.key, o.aggregate_type, o.contract_version,
       to_json(o.created_at) #>> '{}' as created_at,
       o.payload::text as payload,
       o.headers::text as headers,
       true as retry,
       false as held
from crm.outbox_messages o
where o.published_at is null
    and o.next_attempt_at <= now()
    and not exists (
        select
        from crm.outbox_messages earlier
        where earlier.published_at is null
            and earlier.next_attempt_at is not null
            and earlier.aggregate_id = o.aggregate_id
            and earlier.aggregate_type = o.aggregate_type
            and earlier.position < o.position
    )
order by o.next_attempt_at, o.position
limit %(limit)s

-- name: select_fresh
-- Rows that nothing holds back, in position order: walks ix_outbox_messages_publishable. A row whose aggregate
-- has become held since it was written is marked `held` (a probe of ix_outbox_messages_held): it is not published
-- but joins the held ones, and never stands in this queue's way again. Not EXISTS: the planner would hash all held rows.
select o.id::text as id, o.aggregate_id, o.topic, o.key, o.aggregate_type, o.contract_version,
       to_json(o.created_at) #>> '{}' as created_at,
       o.payload::text as payload,
       o.headers::text as headers,
       false as retry,
       coalesce(
           (
               select true
               from crm.outbox_messages h
               where h.published_at is null
                   and h.next_attempt_at is not null
                   and h.aggregate_id = o.aggregate_id
                   and h.aggregate_type = o.aggregate_type
               limit 1
           ),
           false
       ) as held
from crm.outbox_messages o
where o.published_at is null
    and o.next_attempt_at is null
order by o.position
limit %(limit)s

-- name: mark
-- Every fate of a batch in one statement. `delivered`: ids with a delivery report. `refused_ids`, `refused_errors`:
-- in parallel; their whole aggregate waits until the same next_attempt_at, only they count an attempt.
-- `held`: rows that were found waiting behind a held one. `released_…`, in parallel: aggregates whose held head was
-- delivered, so that the rest may follow. No row is in two of them. By primary key and ix_outbox_messages_aggregate.
with refusals as materialized (
    select o.id, o.aggregate_type, o.aggregate_id, r.error,
           now() + least(interval '10 seconds' * power(2, least(o.attempts, 16)), interval '1 hour') as next_attempt_at
    from unnest(%(refused_ids)s::uuid[], %(refused_errors)s::text[]) as r (id, error)
    join crm.outbox_messages o on o.id = r.id
),
delivered as (
    update crm.outbox_messages o
    set published_at = clock_timestamp(),
        next_attempt_at = null
    where o.id = any(%(delivered)s::uuid[])
    returning o.id
),
refused as (
    update crm.outbox_messages o
    set attempts = o.attempts + 1,
        last_error = r.error,
        next_attempt_at = r.next_attempt_at
    from refusals r
    where o.id = r.id
    returning o.id
),
followers as (
    update crm.outbox_messages o
    set next_attempt_at = r.next_attempt_at
    from refusals r
    where o.aggregate_id = r.aggregate_id
        and o.aggregate_type = r.aggregate_type
        and o.published_at is null
        and o.id <> r.id
        and o.id <> all(%(delivered)s::uuid[])
    returning o.id
),
held as (
    update crm.outbox_messages o
    set next_attempt_at = h.next_attempt_at
    from (
        select x.id, max(earlier.next_attempt_at) as next_attempt_at
        from crm.outbox_messages x
        join crm.outbox_messages earlier
            on earlier.aggregate_id = x.aggregate_id
            and earlier.aggregate_type = x.aggregate_type
            and earlier.published_at is null
            and earlier.next_attempt_at is not null
        where x.id = any(%(held)s::uuid[])
        group by x.id
    ) h
    where o.id = h.id
    returning o.id
),
released as (
    update crm.outbox_messages o
    set next_attempt_at = null
    from unnest(%(released_types)s::text[], %(released_ids)s::text[]) as a (aggregate_type, aggregate_id)
    where o.aggregate_id = a.aggregate_id
        and o.aggregate_type = a.aggregate_type
        and o.published_at is null
        and o.next_attempt_at is not null
        and o.id <> all(%(delivered)s::uuid[])
    returning o.id
)
select (select count(*) from delivered) as delivered_count,
       (select count(*) from refused) as refused_count,
       (select count(*) from followers) + (select count(*) from held) as held_count,
       (select count(*) from released) as released_count
