"""The sweep's memory: what is known of each stale installation, and who is asking its portal now.

Revision ID: bookkeeping_0005
Revises: bookkeeping_0004
"""

from alembic import op

revision = "bookkeeping_0005"
down_revision = "bookkeeping_0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # A row without a verdict is claimed and was never decided. The claim is a lease: claimed_until outlives the
    # run that took it by a minute at the most, and a claim that ran out tells of a run that died while it asked.
    op.execute("""
        create table crm.installation_checks (
            installation_id uuid        primary key,
            verdict         text,
            reason          text,
            outcome         text        check (outcome in ('left', 'blocked', 'deleted')),
            attempts        integer     not null default 0,
            ttl_seconds     bigint,
            age_seconds     bigint,
            run_id          uuid,
            last_checked_at timestamptz,
            next_check_at   timestamptz,
            claimed_until   timestamptz,
            claimed_by      uuid,
            overridden_at   timestamptz
        )
    """)
    op.execute("""
        create index ix_installation_checks_claimed_by
            on crm.installation_checks (claimed_by)
            where claimed_by is not null
    """)
    # What the sweep moved and nobody has moved back: every run looks whether a late finish step did.
    op.execute("""
        create index ix_installation_checks_swept
            on crm.installation_checks (installation_id)
            where outcome in ('blocked', 'deleted') and overridden_at is null
    """)
