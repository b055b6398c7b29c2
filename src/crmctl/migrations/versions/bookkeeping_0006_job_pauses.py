"""Pauses of jobs: `crmctl jobs pause` writes them, every batch looks at them.

Revision ID: bookkeeping_0006
Revises: bookkeeping_0005
"""

from alembic import op

revision = "bookkeeping_0006"
down_revision = "bookkeeping_0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        create table crm.job_pauses (
            job       text        primary key,
            reason    text        not null,
            paused_by text        not null,
            paused_at timestamptz not null default now()
        )
    """)
