"""What Alembic runs: the revisions, on the connection that `upgrade` was given."""

from __future__ import annotations

from alembic import context

from flopwright.store.migrations import VERSION_TABLE
from flopwright.store.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
