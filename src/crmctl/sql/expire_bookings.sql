-- The statements of `crmctl bookings expire`, written once and filled in for each of the two phases:
-- {deadline}, {statuses}, {target}, … come from domain/bookings.py, {defect} from the block of that name.

-- name: prepare
-- Deferred constraints would fail at the commit, where no row could be blamed any more. And the queue is to be walked
-- in the order of its partial index at every size and state of the table: the planner cannot know how few rows are
-- poison, and on a small table it prefers to read everything and sort. For the same reason it overrates the cost, and
-- would compile statements of a few milliseconds.
set constraints all immediate;
set local enable_seqscan = off;
set local enable_bitmapscan = off;
set local enable_sort = off;
set local jit = off

-- name: defect
-- Why a due row is poison, or null when it may expire. A scalar subquery, not a join, looks the deal up:
-- the planner cannot turn it into a hash join and lose the index order of the queue.
(case
    when not isfinite(b.{deadline}) then 'DEADLINE_INFINITE'
    when b.tenant_id is null then 'TENANT_MISSING'
    when b.property_object_id is null then 'PROPERTY_OBJECT_MISSING'
    when b.{base} is null or not isfinite(b.{base}) then 'BASE_MISSING'
    when b.{duration} is null then 'DURATION_MISSING'
    when b.{deadline} < b.{base} then 'DEADLINE_BEFORE_BASE'
    when (select true from crm.deals d where d.id = b.deal_id) is null then 'DEAL_MISSING'
end)

-- name: queue
-- The due rows of one phase, within what the command line asked for. The status literals stand in the text,
-- not in a parameter: a bound array would lose the partial index under a generic plan.
b.status in ({statuses})
    and b.{deadline} < %(as_of)s::timestamptz
    and (%(tenant_id)s::uuid is null or b.tenant_id = %(tenant_id)s::uuid)
    and (%(booking_ids)s::uuid[] is null or b.id = any(%(booking_ids)s::uuid[]))

-- name: behind_floor
-- Where the walk goes on: the row comparison is a bound of the index, so nothing before it is read again.
(b.{deadline}, b.id) > (%(floor_deadline)s::timestamptz, %(floor_id)s::uuid)

-- name: expire
-- Steps 2 to 5 of UC-BKG-003 for up to batch_size rows: lock, transition, timeline, outbox. Every timeline
-- and outbox row comes from the UPDATE's RETURNING, so there is none without a transition. The UPDATE finds
-- its rows by id = any(array), which keeps the primary key at every size and loses no row that another
-- session changed between our snapshot and our lock. `reached` is the key, as this statement's snapshot
-- has it, of the last row that the walk over {index} locked. `suppressed_ids`: rows whose UPDATE a trigger skipped.
with picked as materialized (
    select b.id
    from crm.bookings b
    where {queue}
    and {behind_floor}
    and {defect} is null
    order by b.{deadline}, b.id
    limit %(batch_size)s
    for no key update skip locked
),
expired as (
    update crm.bookings b
    set status = '{target}',
        expired_at = %(as_of)s::timestamptz,
        version = b.version + 1,
        updated_at = now()
    where b.id = any(array(select p.id from picked p))
    returning b.id, b.tenant_id, b.deal_id, b.property_object_id
),
timeline as (
    insert into crm.deal_timeline_events (tenant_id, deal_id, type, payload, occurred_at)
    select e.tenant_id, e.deal_id, '{timeline_type}', jsonb_build_object('BookingId', e.id), %(as_of)s::timestamptz
    from expired e
),
outbox as (
    insert into crm.outbox_messages
        (topic, key, aggregate_type, aggregate_id, contract_version, payload, headers)
    select '{topic}', e.id::text, '{aggregate_type}', e.id::text, {contract_version},
           jsonb_build_object(
               'BookingId', e.id,
               'TenantId', e.tenant_id,
               'DealId', e.deal_id,
               'PropertyObjectId', e.property_object_id,
               'Phase', '{phase}',
               'ExpiredAt', %(as_of)s::timestamptz
           ),
           jsonb_build_object('traceparent', %(traceparent)s::text)
    from expired e
)
select (select count(*) from picked) as picked_count,
       (select count(*) from expired) as expired_count,
       reached.deadline::text as reached_deadline,
       reached.id as reached_id,
       case
           when (select count(*) from picked) <> (select count(*) from expired)
               then array(select p.id from picked p where p.id not in (select e.id from expired e))
           else '{{}}'
       end as suppressed_ids
from (values (1)) as one
left join lateral (
    select b.{deadline} as deadline, b.id
    from crm.bookings b
    where b.id = (array(select p.id from picked p))[(select count(*) from picked)]
) as reached on true

-- name: pick_one
-- The next row of the queue, locked until the end of the transaction: what the bisecting narrows down to. Its key is
-- the one at which the walk over {index} met it, whatever another session made of the deadline since.
with picked as materialized (
    select b.id
    from crm.bookings b
    where {queue}
        and {behind_floor}
        and {defect} is null
    order by b.{deadline}, b.id
    limit 1
    for no key update skip locked
)
select b.id, b.{deadline}::text as deadline
from crm.bookings b
where b.id = (select p.id from picked p)

-- name: left_behind
-- What the batch walked past between its floor and the last key that it reached: its own rows have left the
-- queue by now, so what is still due was locked by somebody else, or is poison, or failed when written. `has_more`:
-- whether any row that may expire stands behind that key; if none does, whatever is left there is looked at as
-- well. Walks {index} once more, between its bounds.
with beyond as materialized (
    select exists (
        select
        from crm.bookings b
        where {queue}
            and (b.{deadline}, b.id) > (%(reached_deadline)s::timestamptz, %(reached_id)s::uuid)
            and {defect} is null
    ) as has_more
),
passed as materialized (
    select b.id, {defect} as defect
    from crm.bookings b
    where {queue}
        and {behind_floor}
        and (b.{deadline}, b.id) <= (
            (select case when y.has_more then %(reached_deadline)s::timestamptz else 'infinity' end from beyond y),
            (select case when y.has_more then %(reached_id)s::uuid else %(end_id)s::uuid end from beyond y)
        )
)
select count(*) filter (where p.defect is null and p.id <> all(%(failed_ids)s::uuid[])) as skipped_locked_count,
       count(*) filter (where p.defect is not null) as defect_count,
       coalesce(
           (
               select jsonb_agg(jsonb_build_object('booking_id', d.id, 'reason', d.defect))
               from (select q.id, q.defect from passed q where q.defect is not null limit %(list_limit)s) d
           ),
           '[]'
       ) as defects,
       (select y.has_more from beyond y) as has_more
from passed p

-- name: count_due
-- How many rows stand in the queue behind the floor, counted up to a limit. Walks {index}.
select count(*)
from (
    select
    from crm.bookings b
    where {queue}
    and {behind_floor}
    and {defect} is null
    order by b.{deadline}, b.id
    limit %(count_limit)s
) as beyond

-- name: not_expired
-- What became of the bookings named with --id; EXPIRED are those of this very transaction, NOT_REACHED those that
-- --max-expire or the time budget left behind the floors. By primary key.
select named.id as booking_id,
       case
           when b.id is null then 'NOT_FOUND'
           when b.status in ({terminal_statuses}) and b.updated_at = now() then 'EXPIRED'
           when b.status in ({reserve_statuses}) and b.reserve_expires_at < %(as_of)s::timestamptz then
               case
                   when {reserve_defect} is not null then {reserve_defect}
                   when (b.reserve_expires_at, b.id) > (%(reserve_floor_deadline)s::timestamptz, %(reserve_floor_id)s::uuid) then 'NOT_REACHED'
                   else 'LOCKED'
               end
           when b.status in ({booking_statuses}) and b.booking_expires_at < %(as_of)s::timestamptz then
               case
                   when {booking_defect} is not null then {booking_defect}
                   when (b.booking_expires_at, b.id) > (%(booking_floor_deadline)s::timestamptz, %(booking_floor_id)s::uuid) then 'NOT_REACHED'
                   else 'LOCKED'
               end
           when b.status in ({reserve_statuses}, {booking_statuses}) then 'NOT_DUE'
           when b.status in ({terminal_statuses}) then 'ALREADY_EXPIRED'
           else 'STATUS_NOT_OURS'
       end as reason
from unnest(%(booking_ids)s::uuid[]) as named (id)
left join crm.bookings b
    on b.id = named.id
    and (%(tenant_id)s::uuid is null or b.tenant_id = %(tenant_id)s)
