"""Is a database a store of ours, whole, and of which schema? Older ones are brought up to date."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, inspect, select, text

from flopwright.errors import InputError, Violation
from flopwright.store.migrations import upgrade
from flopwright.store.tables import OWNER, STORE_SCHEMA, MeasurementRow, SchemaRow

# Any constant will do: it keeps two processes from making the tables at the same time.
_POSTGRES_LOCK: Final = 0x666C6F70


def check_health(connection: Connection) -> None:
    """Refuses a damaged SQLite file; PostgreSQL looks after itself."""
    if connection.dialect.name != "sqlite":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _POSTGRES_LOCK})
        return
    found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if found != "ok":
        raise InputError(
            Violation(
                file=str(connection.engine.url.database),
                rule=f"the file is damaged: {found}",
                nearest_fix="restore a copy, or move it away and a new store is made",
            )
        )


def check_or_make_schema(connection: Connection) -> None:
    """Makes the tables of an empty database, brings older ones up to date, refuses others."""
    where = connection.engine.url.render_as_string(hide_password=True)
    existing = set(inspect(connection).get_table_names())
    if not existing & {SchemaRow.__tablename__, MeasurementRow.__tablename__}:
        # A database with only foreign tables is somebody else's, unless it is a shared
        # server, where other programs' tables are normal.
        if existing and connection.dialect.name == "sqlite":
            raise InputError(_not_ours(where))
        upgrade(connection, known=0)
        return
    if SchemaRow.__tablename__ not in existing or not _owned(connection):
        raise InputError(_not_ours(where))
    version = connection.execute(
        select(SchemaRow.version).where(SchemaRow.owner == OWNER)
    ).scalar()
    if version is None:
        raise InputError(_not_ours(where))
    if version > STORE_SCHEMA:
        raise InputError(
            Violation(
                file=where,
                field="schema_version",
                value=str(version),
                rule="written by a newer flopwright",
                limit=str(STORE_SCHEMA),
                nearest_fix="upgrade flopwright",
            )
        )
    if version < STORE_SCHEMA:
        upgrade(connection, known=version)


def _owned(connection: Connection) -> bool:
    columns = {c["name"] for c in inspect(connection).get_columns(SchemaRow.__tablename__)}
    return {"owner", "version"} <= columns


def _not_ours(where: str) -> Violation:
    return Violation(
        file=where,
        rule="the database belongs to another program",
        nearest_fix="name another file; a new store is made there",
    )
