"""The ledger of dead letters: what became of each.

Revision ID: bookkeeping_0004
Revises: bookkeeping_0003
"""

from alembic import op

revision = "bookkeeping_0004"
down_revision = "bookkeeping_0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # topic_id, partition and offset are the letter's own, in the dead-letter topic; source_… those of its record in
    # messenger's, null where its headers do not say. A row that is `failed` is of a letter that is still open.
    op.execute("""
        create table crm.dlq_resolutions (
            topic_id         text        not null,
            partition        integer     not null,
            "offset"         bigint      not null,
            source_topic_id  text,
            source_partition integer,
            source_offset    bigint,
            resolution       text        not null
                check (resolution in ('applied', 'stale', 'duplicate', 'discarded', 'failed')),
            code             text,
            reason           text,
            attempts         integer     not null default 0,
            resolved_by      text        not null,
            run_id           uuid        not null,
            first_tried_at   timestamptz not null default now(),
            resolved_at      timestamptz not null default now(),
            primary key (topic_id, partition, "offset")
        )
    """)
    # Closes every other letter of the same source record.
    op.execute("""
        create index ix_dlq_resolutions_source
            on crm.dlq_resolutions (source_topic_id, source_partition, source_offset)
            where resolution <> 'failed'
    """)
    op.execute("""
        create index ix_dlq_resolutions_failed
            on crm.dlq_resolutions (topic_id, partition, "offset")
            where resolution = 'failed'
    """)
