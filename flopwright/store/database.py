"""The store: measurements in, measurements and one table out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Connection, Engine, select
from sqlalchemy.dialects import postgresql, sqlite

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.report.metrics import Measurement
from flopwright.report.records import AnyRecord, Record
from flopwright.report.trace import Trace, TraceEvent
from flopwright.store.engine import make_engine, parse_url, transaction
from flopwright.store.schema_state import check_health, check_or_make_schema
from flopwright.store.tables import (
    MeasurementRow,
    RecordRow,
    TraceRow,
    record_values,
    row_values,
)
from flopwright.store.traces import MAX_EVENTS, packed, unpacked

if TYPE_CHECKING:
    import pandas as pd

_R = TypeVar("_R")


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
        check_health(connection)
        check_or_make_schema(connection)
    return Store(engine)


def store_exists(url: str | None = None) -> bool:
    """Returns whether a SQLite file is there; a server is asked only when it is opened."""
    parsed = parse_url(url or default_url())
    if parsed.get_backend_name() != "sqlite":
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

    def add(self, measurement: Measurement, trace: Sequence[TraceEvent] = ()) -> bool:
        """Adds a measurement; returns False where it was already there.

        Args:
            trace: every rank's actions of a typical step, kept for replaying it; one of more
                than MAX_EVENTS is left out.

        Raises:
            InputError: another measurement already has this id.
        """
        new = self.add_all([measurement]) == 1
        if trace and len(trace) <= MAX_EVENTS:
            values = {"measurement_id": measurement.id, "events": packed(trace)}
            with transaction(self._engine, write=True) as connection:
                connection.execute(self._insert(TraceRow, values, "measurement_id"))
        return new

    def trace(self, measurement_id: str) -> Trace:
        """Returns a measurement's trace, empty where none was kept."""
        query = select(TraceRow.events).where(TraceRow.measurement_id == measurement_id)
        with transaction(self._engine) as connection:
            found = connection.execute(query).scalar()
        return () if found is None else unpacked(found, f"traces.{measurement_id}")

    def add_record(self, record: Record) -> bool:
        """Adds rounds, stages or an engine's log; returns False where it was already there.

        Raises:
            InputError: another record already has this id.
        """
        values = record_values(record)
        with transaction(self._engine, write=True) as connection:
            if connection.execute(self._insert(RecordRow, values, "id")).rowcount == 1:
                return True
            _refuse_other(connection, RecordRow, record.id, values["payload"])
        return False

    def records(self, *, kind: str | None = None, name: str | None = None) -> list[Record]:
        """Returns the other records that match every given filter, oldest first."""
        query = select(RecordRow.id, RecordRow.payload)
        for column, wanted in ((RecordRow.kind, kind), (RecordRow.name, name)):
            if wanted is not None:
                query = query.where(column == wanted)
        with transaction(self._engine) as connection:
            rows = connection.execute(query.order_by(RecordRow.created, RecordRow.id)).all()
        reader: TypeAdapter[Record] = TypeAdapter(AnyRecord)
        return [self._read(reader, f"records.{row.id}", row.payload) for row in rows]

    def _insert(self, table: type[Any], values: dict[str, Any], key: str) -> Any:
        """Returns the statement that adds a row unless its key is there."""
        insert = sqlite.insert if self._engine.dialect.name == "sqlite" else postgresql.insert
        return insert(table).values(**values).on_conflict_do_nothing(index_elements=[key])

    def add_all(self, measurements: Iterable[Measurement]) -> int:
        """Adds all measurements or, on an error, none; returns how many were new."""
        new = 0
        with transaction(self._engine, write=True) as connection:
            for measurement in measurements:
                values = row_values(measurement)
                statement = self._insert(MeasurementRow, values, "id")
                if connection.execute(statement).rowcount == 1:
                    new += 1
                else:
                    _refuse_other(connection, MeasurementRow, measurement.id, values["payload"])
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
        reader = TypeAdapter(Measurement)
        return [self._read(reader, f"measurements.{row.id}", row.payload) for row in rows]

    def _read(self, reader: TypeAdapter[_R], field: str, payload: Any) -> _R:
        try:
            return reader.validate_python(payload)
        except ValidationError as error:
            raise InputError(
                Violation(
                    field=field,
                    rule=f"the stored record cannot be read: {error.errors()[0]['msg']}",
                    file=self.url,
                )
            ) from error

    def frame(self) -> pd.DataFrame:
        """Returns everything as one table; see `flopwright.store.frame`."""
        from flopwright.store.frame import joined, measurements_frame, records_frame

        return joined([measurements_frame(self.measurements()), records_frame(self.records())])


def _refuse_other(connection: Connection, table: type[Any], row_id: str, payload: Any) -> None:
    query = select(table.payload).where(table.id == row_id)
    if connection.execute(query).scalar() != payload:
        what = table.__tablename__.removesuffix("s")
        raise InputError(
            Violation(
                field=f"{what}.id",
                value=row_id,
                rule=f"the store already holds another {what} under this id",
                nearest_fix=f"give the run another id; {what}s are never overwritten",
            )
        )
