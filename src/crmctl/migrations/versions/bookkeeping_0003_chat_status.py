"""The deal-chat-status consumer: idempotency marks, source positions, events that wait for their deal.

Revision ID: bookkeeping_0003
Revises: bookkeeping_0002
"""

from alembic import op

revision = "bookkeeping_0003"
down_revision = "bookkeeping_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        create table crm.processed_messages (
            key          text        primary key,
            processed_at timestamptz not null default now()
        )
    """)
    # prune walks the marks by age.
    op.execute("""
        create index ix_processed_messages_processed_at
            on crm.processed_messages (processed_at)
    """)
    # changed_at is microseconds since 1970: messenger may send DateTimeOffset's extremes.
    op.execute("""
        create table crm.deal_chat_positions (
            deal_id    uuid        primary key,
            topic_id   text        not null,
            partition  integer     not null,
            "offset"   bigint      not null,
            changed_at bigint      not null,
            updated_at timestamptz not null default now()
        )
    """)
    op.execute("""
        create table crm.deferred_messages (
            topic_id        text        not null,
            partition       integer     not null,
            "offset"        bigint      not null,
            topic           text        not null,
            message_id      uuid        not null,
            deal_id         uuid        not null,
            key             bytea,
            value           bytea       not null,
            headers         jsonb       not null,
            timestamp_ms    bigint      not null,
            attempts        integer     not null,
            next_attempt_at timestamptz not null,
            deferred_at     timestamptz not null default now(),
            primary key (topic_id, partition, "offset")
        )
    """)
    op.execute("create index ix_deferred_messages_deal on crm.deferred_messages (deal_id)")
    op.execute("create index ix_deferred_messages_next_attempt_at on crm.deferred_messages (next_attempt_at)")
    op.execute("create index ix_deferred_messages_message on crm.deferred_messages (message_id)")
