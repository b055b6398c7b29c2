"""Extensions: the idempotency of `bookings extend`, and what the deal's participants are to be told.

Revision ID: bookkeeping_0002
Revises: bookkeeping_0001
"""

from alembic import op

revision = "bookkeeping_0002"
down_revision = "bookkeeping_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # `result` is null only inside the transaction that inserted the row.
    op.execute("""
        create table crm.extension_requests (
            tenant_id     uuid        not null,
            request_id    uuid        not null,
            booking_id    uuid        not null,
            actor_subject text        not null,
            result        jsonb,
            created_at    timestamptz not null default now(),
            primary key (tenant_id, request_id)
        )
    """)
    op.execute("""
        create table crm.deal_notifications (
            id           uuid        primary key default gen_random_uuid(),
            tenant_id    uuid        not null,
            deal_id      uuid        not null,
            type         text        not null,
            payload      jsonb       not null,
            created_at   timestamptz not null default now(),
            delivered_at timestamptz
        )
    """)
    # The CRM's notifier reads what it has not delivered yet.
    op.execute("""
        create index ix_deal_notifications_undelivered
            on crm.deal_notifications (created_at, id)
            where delivered_at is null
    """)
