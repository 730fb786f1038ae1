"""The store's schema, revision by revision (Alembic); `upgrade` brings a database to the last.

To change the schema: change `store/tables.py`, add a file to `versions/`, raise
`tables.STORE_SCHEMA` to its number. A test holds the last revision against the tables.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection

# Other programs on a shared server have an "alembic_version" of their own.
VERSION_TABLE: Final = "flopwright_schema_revision"


def upgrade(connection: Connection, *, known: int) -> None:
    """Brings the schema to the last revision, inside the connection's transaction.

    Args:
        known: revision that the database is at; 0 is an empty one.
    """
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "flopwright.store:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    if known:
        command.stamp(config, f"{known:04d}", purge=True)
    command.upgrade(config, "head")
