"""The CRM's core tables: deals, bookings, the deal timeline, the outbox.

Revision ID: core_0001
Revises: none (base of the branch "core")
"""

from alembic import op

revision = "core_0001"
down_revision = None
branch_labels = ("core",)
depends_on = None


def upgrade() -> None:
    op.execute("""
        create table crm.deals (
            id          uuid        primary key,
            tenant_id   uuid        not null,
            status      text        not null,
            chat_status text        not null default 'Pending',
            deleted_at  timestamptz,
            version     integer     not null default 1,
            created_at  timestamptz not null,
            updated_at  timestamptz not null
        )
    """)
    # No foreign key to deals: aggregates refer to each other by id, and a booking whose deal is gone is
    # a poison row that the expiry reports, not an insert that fails.
    op.execute("""
        create table crm.bookings (
            id                       uuid        primary key,
            tenant_id                uuid        not null,
            deal_id                  uuid        not null,
            property_object_id       uuid        not null,
            status                   text        not null,
            reserve_duration_minutes integer     not null,
            booking_duration_hours   integer     not null,
            created_at               timestamptz not null,
            reserve_expires_at       timestamptz,
            booked_at                timestamptz,
            booking_expires_at       timestamptz,
            expired_at               timestamptz,
            extensions_count         integer     not null default 0,
            version                  integer     not null default 1,
            updated_at               timestamptz not null
        )
    """)
    op.execute("""
        create index ix_bookings_reserve_expires_at
            on crm.bookings (reserve_expires_at, id)
            where status in ('Reserved', 'AwaitingPayment')
    """)
    op.execute("""
        create index ix_bookings_booking_expires_at
            on crm.bookings (booking_expires_at, id)
            where status = 'Booked'
    """)
    op.execute("""
        create unique index ux_bookings_active_property_object
            on crm.bookings (property_object_id)
            where status in ('Reserved', 'AwaitingPayment', 'Booked')
    """)
    op.execute("""
        create unique index ux_bookings_active_deal
            on crm.bookings (deal_id)
            where status in ('Reserved', 'AwaitingPayment', 'Booked')
    """)
    op.execute("""
        create table crm.deal_timeline_events (
            id          uuid        primary key default gen_random_uuid(),
            tenant_id   uuid        not null,
            deal_id     uuid        not null,
            type        text        not null,
            payload     jsonb       not null,
            occurred_at timestamptz not null
        )
    """)
    op.execute("""
        create index ix_deal_timeline_events_deal
            on crm.deal_timeline_events (deal_id, occurred_at)
    """)
    op.execute("""
        create table crm.outbox_messages (
            id               uuid        primary key default gen_random_uuid(),
            position         bigint      not null generated always as identity,
            topic            text        not null,
            key              text        not null,
            aggregate_type   text        not null,
            aggregate_id     text        not null,
            contract_version integer     not null,
            payload          jsonb       not null,
            headers          jsonb       not null default '{}',
            created_at       timestamptz not null default now(),
            published_at     timestamptz,
            attempts         integer     not null default 0,
            last_error       text,
            next_attempt_at  timestamptz
        )
    """)
    # What the relay walks: rows that nothing holds back. A row that the broker refused, and the later rows of
    # its aggregate, have a next_attempt_at and stand in the two small indexes of held rows instead.
    op.execute("""
        create index ix_outbox_messages_publishable
            on crm.outbox_messages (position)
            where published_at is null and next_attempt_at is null
    """)
    op.execute("""
        create index ix_outbox_messages_held
            on crm.outbox_messages (aggregate_id, position)
            where published_at is null and next_attempt_at is not null
    """)
    op.execute("""
        create index ix_outbox_messages_next_attempt_at
            on crm.outbox_messages (next_attempt_at, position)
            where published_at is null and next_attempt_at is not null
    """)
    op.execute("""
        create index ix_outbox_messages_aggregate
            on crm.outbox_messages (aggregate_id, position)
    """)
