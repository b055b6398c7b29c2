-- name: prepare
-- A deferred constraint fails in the statement that breaks it, where the refusal can be told; so does a dry run's.
set constraints all immediate

-- name: claim_request
-- First write of an extension: its idempotency mark. Waits for a concurrent run with the same request id,
-- and returns no row if that run (or an earlier one) committed. By primary key.
insert into crm.extension_requests (tenant_id, request_id, booking_id, actor_subject)
values (%(tenant_id)s, %(request_id)s, %(booking_id)s, %(actor_subject)s)
on conflict (tenant_id, request_id) do nothing
returning request_id

-- name: earlier_request
-- What an earlier run with the same request id was for, and what it answered. By primary key.
select r.booking_id, r.result
from crm.extension_requests r
where r.tenant_id = %(tenant_id)s
    and r.request_id = %(request_id)s

-- name: lock_booking
-- The booking as it is once nobody else holds it; waits at most lock_timeout. By primary key.
select b.status, b.booking_expires_at::text as old_deadline, isfinite(b.booking_expires_at) as finite
from crm.bookings b
where b.id = %(booking_id)s
    and b.tenant_id = %(tenant_id)s
for no key update

-- name: extend
-- UC-BKG-003 A1, steps 3 to 5, on the row that is locked: the new deadline from the old one and the snapshot of
-- the program's terms, the timeline row, the notification, and the answer for the request id. By primary key.
with extended as (
    update crm.bookings b
    set booking_expires_at = b.booking_expires_at + make_interval(hours => b.booking_duration_hours),
        extensions_count = b.extensions_count + 1,
        version = b.version + 1,
        updated_at = now()
    where b.id = %(booking_id)s
    returning b.id, b.tenant_id, b.deal_id, b.booking_expires_at, b.extensions_count, b.version
),
payload as (
    select e.*, jsonb_build_object('BookingId', e.id, 'NewBookingExpiresAt', e.booking_expires_at) as body
    from extended e
),
timeline as (
    insert into crm.deal_timeline_events (tenant_id, deal_id, type, payload, occurred_at)
    select p.tenant_id, p.deal_id, 'BookingExtended', p.body, now()
    from payload p
),
notification as (
    insert into crm.deal_notifications (tenant_id, deal_id, type, payload)
    select p.tenant_id, p.deal_id, 'BookingExtended', p.body
    from payload p
),
answer as (
    update crm.extension_requests r
    set result = jsonb_build_object(
            'booking_id', e.id,
            'old_booking_expires_at', %(old_deadline)s::timestamptz,
            'new_booking_expires_at', e.booking_expires_at,
            'extensions_count', e.extensions_count,
            'version', e.version,
            'new_deadline_is_past', e.booking_expires_at < now()
        )
    from extended e
    where r.tenant_id = %(tenant_id)s
        and r.request_id = %(request_id)s
    returning r.result
)
select a.result
from answer a
