"""The store: measurements in, measurements and one table out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError
from sqlalchemy import Connection, Engine, inspect, select, text
from sqlalchemy.dialects import postgresql, sqlite

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.report.metrics import Measurement
from flopwright.store.engine import make_engine, parse_url, transaction
from flopwright.store.tables import (
    OWNER,
    STORE_SCHEMA,
    Base,
    MeasurementRow,
    SchemaRow,
    row_values,
)

if TYPE_CHECKING:
    import pandas as pd

# Any constant will do: it keeps two processes from making the tables at the same time.
_POSTGRES_LOCK: Final = 0x666C6F70


def default_url() -> str:
    """Returns the store's address: $FLOPWRIGHT_STORE, else a file in the user's own folder.

    That folder is $FLOPWRIGHT_HOME, or ~/.local/share/flopwright.
    """
    named = os.environ.get("FLOPWRIGHT_STORE")
    if named:
        return named
    home = os.environ.get("FLOPWRIGHT_HOME")
    folder = Path(home).expanduser() if home else Path.home() / ".local/share/flopwright"
    return f"sqlite:///{folder.absolute() / 'store.sqlite'}"


def open_store(url: str | None = None, *, create: bool = True) -> Store:
    """Returns the store at `url`.

    Args:
        url: "sqlite:///runs.sqlite", a path, or "postgresql://user@host/name"; None is
            `default_url()`.
        create: make the file where there is none. Who only reads says False: a misspelt
            name is then an error, and nothing is made.

    Raises:
        InputError: not there (without `create`), not ours, damaged, written by a newer
            flopwright, not reachable, or the PostgreSQL driver is missing.
    """
    if not create and not store_exists(url):
        raise InputError(_absent(url))
    engine = make_engine(parse_url(url or default_url()))
    with transaction(engine, write=True) as connection:
        _check_health(connection)
        _check_or_create_schema(connection)
    return Store(engine)


def store_exists(url: str | None = None) -> bool:
    """Returns whether a SQLite file is there; a server is asked only when it is opened."""
    parsed = parse_url(url or default_url())
    if parsed.get_backend_name() != "sqlite" or parsed.database in {None, "", ":memory:"}:
        return True
    return Path(str(parsed.database)).exists()


def _absent(url: str | None) -> Violation:
    path = Path(str(parse_url(url or default_url()).database))
    folder = path.parent
    names = [p.name for p in folder.glob("*.sqlite")] if folder.is_dir() else []
    near = did_you_mean(path.name, names) if names else ""
    return Violation(
        field="store",
        value=str(path),
        rule="the store does not exist",
        nearest_fix=near or "a run makes it: flopwright run PLAN",
    )


class Store:
    """Measurements by id. Made by `open_store`; safe to use from several processes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def url(self) -> str:
        """The store's address, without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    def close(self) -> None:
        """Closes the connections; the store opens them again when it is used again."""
        self._engine.dispose()

    def add(self, measurement: Measurement) -> bool:
        """Adds a measurement; returns False where it was already there.

        Raises:
            InputError: another measurement already has this id.
        """
        return self.add_all([measurement]) == 1

    def add_all(self, measurements: Iterable[Measurement]) -> int:
        """Adds all measurements or, on an error, none; returns how many were new."""
        insert = sqlite.insert if self._engine.dialect.name == "sqlite" else postgresql.insert
        new = 0
        with transaction(self._engine, write=True) as connection:
            for measurement in measurements:
                values = row_values(measurement)
                statement = (
                    insert(MeasurementRow)
                    .values(**values)
                    .on_conflict_do_nothing(index_elements=["id"])
                )
                if connection.execute(statement).rowcount == 1:
                    new += 1
                else:
                    _refuse_other(connection, measurement.id, values["payload"])
        return new

    def measurements(
        self,
        *,
        kind: str | None = None,
        plan_name: str | None = None,
        stack_id: str | None = None,
        ids: Iterable[str] | None = None,
    ) -> list[Measurement]:
        """Returns the measurements that match every given filter, oldest first."""
        query = select(MeasurementRow.id, MeasurementRow.payload)
        filters = (
            (MeasurementRow.kind, kind),
            (MeasurementRow.plan_name, plan_name),
            (MeasurementRow.stack_id, stack_id),
        )
        for column, wanted in filters:
            if wanted is not None:
                query = query.where(column == wanted)
        if ids is not None:
            query = query.where(MeasurementRow.id.in_(list(ids)))
        query = query.order_by(MeasurementRow.created, MeasurementRow.id)
        with transaction(self._engine) as connection:
            rows = connection.execute(query).all()
        return [self._read(row.id, row.payload) for row in rows]

    def _read(self, row_id: str, payload: Any) -> Measurement:
        try:
            return Measurement.model_validate(payload)
        except ValidationError as error:
            raise InputError(
                Violation(
                    field=f"measurements.{row_id}",
                    rule=f"the stored record cannot be read: {error.errors()[0]['msg']}",
                    file=self.url,
                )
            ) from error

    def frame(self) -> pd.DataFrame:
        """Returns all measurements as one table; see `flopwright.store.frame`."""
        from flopwright.store.frame import measurements_frame

        return measurements_frame(self.measurements())


def _check_health(connection: Connection) -> None:
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


def _check_or_create_schema(connection: Connection) -> None:
    where = connection.engine.url.render_as_string(hide_password=True)
    existing = set(inspect(connection).get_table_names())
    if not existing & {SchemaRow.__tablename__, MeasurementRow.__tablename__}:
        # A database with only foreign tables is somebody else's, unless it is a shared
        # server, where other programs' tables are normal.
        if existing and connection.dialect.name == "sqlite":
            raise InputError(_not_ours(where))
        Base.metadata.create_all(connection)
        connection.execute(
            SchemaRow.__table__.insert().values(owner=OWNER, version=STORE_SCHEMA)  # type: ignore[attr-defined]
        )
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


def _owned(connection: Connection) -> bool:
    columns = {c["name"] for c in inspect(connection).get_columns(SchemaRow.__tablename__)}
    return {"owner", "version"} <= columns


def _not_ours(where: str) -> Violation:
    return Violation(
        file=where,
        rule="the database belongs to another program",
        nearest_fix="name another file; a new store is made there",
    )


def _refuse_other(connection: Connection, row_id: str, payload: Any) -> None:
    query = select(MeasurementRow.payload).where(MeasurementRow.id == row_id)
    if connection.execute(query).scalar() != payload:
        raise InputError(
            Violation(
                field="measurement.id",
                value=row_id,
                rule="the store already holds another measurement under this id",
                nearest_fix="give the run another id; measurements are never overwritten",
            )
        )
