-- The read side: `crmctl bookings list` and `show`. Rows are built as JSON here, because Python's datetime
-- cannot hold PostgreSQL's infinity.

-- name: list_active
-- Active bookings of both phases by deadline: each phase from its partial index, then merged.
with queue as (
    (
        select b.id, b.reserve_expires_at as deadline
        from crm.bookings b
        where b.status in ('Reserved', 'AwaitingPayment')
            and (not %(due)s::boolean or b.reserve_expires_at < now())
            and (%(tenant_id)s::uuid is null or b.tenant_id = %(tenant_id)s::uuid)
        order by b.reserve_expires_at, b.id
        limit %(limit)s
    )
    union all
    (
        select b.id, b.booking_expires_at as deadline
        from crm.bookings b
        where b.status = 'Booked'
            and (not %(due)s::boolean or b.booking_expires_at < now())
            and (%(tenant_id)s::uuid is null or b.tenant_id = %(tenant_id)s::uuid)
        order by b.booking_expires_at, b.id
        limit %(limit)s
    )
)
select jsonb_build_object(
           'id', b.id,
           'tenant_id', b.tenant_id,
           'deal_id', b.deal_id,
           'property_object_id', b.property_object_id,
           'status', b.status,
           'deadline', q.deadline,
           'overdue', q.deadline < now(),
           'version', b.version
       ) as booking
from queue q
join crm.bookings b on b.id = q.id
order by q.deadline, q.id
limit %(limit)s

-- name: list_by_status
-- Bookings of the given statuses, the latest changed first. Reads the whole table: it is for people, not for jobs.
select jsonb_build_object(
           'id', b.id,
           'tenant_id', b.tenant_id,
           'deal_id', b.deal_id,
           'property_object_id', b.property_object_id,
           'status', b.status,
           'deadline', d.deadline,
           'overdue', d.active and d.deadline < now(),
           'version', b.version
       ) as booking
from crm.bookings b
cross join lateral (
    select case when b.booked_at is null then b.reserve_expires_at else b.booking_expires_at end as deadline,
           b.status in ('Reserved', 'AwaitingPayment', 'Booked') as active
) as d
where b.status = any(%(statuses)s::text[])
    and (%(tenant_id)s::uuid is null or b.tenant_id = %(tenant_id)s::uuid)
order by b.updated_at desc, b.id
limit %(limit)s

-- name: show
-- One booking, by primary key.
select to_jsonb(b) as booking
from crm.bookings b
where b.id = %(booking_id)s

-- name: timeline
-- What the deal's timeline says of one booking. Uses ix_deal_timeline_events_deal.
select jsonb_build_object('occurred_at', t.occurred_at, 'type', t.type, 'payload', t.payload) as event
from crm.deal_timeline_events t
where t.deal_id = (select b.deal_id from crm.bookings b where b.id = %(booking_id)s)
    and t.payload ->> 'BookingId' = %(booking_id)s::text
order by t.occurred_at, t.id

-- name: events
-- The outbox messages of one booking. Uses ix_outbox_messages_aggregate.
select jsonb_build_object(
           'message_id', o.id,
           'topic', o.topic,
           'created_at', o.created_at,
           'published_at', o.published_at,
           'payload', o.payload
       ) as event
from crm.outbox_messages o
where o.aggregate_id = %(booking_id)s::text
    and o.aggregate_type = 'Booking'
order by o.position
