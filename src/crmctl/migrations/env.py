"""Alembic's environment: it runs on the connection that `crmctl db` hands over, in that transaction."""

from alembic import context

from crmctl.migrations import SCHEMA, VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=None,
    version_table=VERSION_TABLE,
    version_table_schema=SCHEMA,
    transactional_ddl=True,
)
context.run_migrations()
