"""crmctl's bookkeeping: the record of runs, and the oldest crmctl that may use this schema.

Revision ID: bookkeeping_0001
Revises: none (base of the branch "bookkeeping")
"""

from alembic import op

revision = "bookkeeping_0001"
down_revision = None
branch_labels = ("bookkeeping",)
depends_on = None


def upgrade() -> None:
    op.execute("""
        create table crm.job_runs (
            run_id      uuid        not null,
            batch       integer     not null,
            job         text        not null,
            actor       text        not null,
            as_of       timestamptz,
            started_at  timestamptz not null,
            finished_at timestamptz not null,
            outcome     text        not null check (outcome in ('committed', 'failed')),
            counts      jsonb       not null default '{}',
            error_code  text,
            error       text,
            version     text        not null,
            host        text        not null,
            primary key (run_id, batch)
        )
    """)
    op.execute("""
        create index ix_job_runs_job_finished_at
            on crm.job_runs (job, finished_at)
    """)
    # A later migration that older binaries must not run against raises this version.
    op.execute("""
        create table crm.crmctl_compatibility (
            part            text primary key,
            minimum_version text not null
        )
    """)
    op.execute("insert into crm.crmctl_compatibility (part, minimum_version) values ('bookkeeping', '0.1.0')")
