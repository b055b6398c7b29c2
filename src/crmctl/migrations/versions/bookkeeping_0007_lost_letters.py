"""Dead letters that the topic lost while they were open can be acknowledged.

Revision ID: bookkeeping_0007
Revises: bookkeeping_0006
"""

from alembic import op

revision = "bookkeeping_0007"
down_revision = "bookkeeping_0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # A row that is `lost` closes its own letter and no other one of its source record.
    op.execute("""
        alter table crm.dlq_resolutions
            drop constraint dlq_resolutions_resolution_check,
            add constraint dlq_resolutions_resolution_check
                check (resolution in ('applied', 'stale', 'duplicate', 'discarded', 'lost', 'failed'))
    """)
