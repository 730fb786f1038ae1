"""Opening the database: a SQLite file by default, PostgreSQL by URL.

SQLite runs in write-ahead mode with a busy timeout, so that several processes may write
at once: a writer waits for its turn instead of failing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from flopwright.errors import InputError, Violation
from flopwright.store.network_fs import refuse_network_file

BUSY_TIMEOUT_S: Final = 30.0
_BEGIN: Final = "flopwright_begin"


def _json_or_text(text: str) -> Any:
    """Returns the JSON, or the text where it is none: its reader names the record then."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def parse_url(text: str) -> URL:
    """Returns the database address; text without "://" is the path of a SQLite file.

    Raises:
        InputError: it is no address, of another kind of database, or of one in memory.
    """
    if "://" not in text:
        return _kept(URL.create("sqlite", database=str(Path(text).expanduser())))
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise InputError(Violation(field="store", value=repr(text), rule=str(error))) from error
    if url.drivername in {"postgresql", "postgres"}:
        return url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() not in {"sqlite", "postgresql"}:
        raise InputError(
            Violation(
                field="store",
                value=url.render_as_string(hide_password=True),
                rule="the store is a SQLite file or a PostgreSQL database",
                nearest_fix="write it like sqlite:///runs.sqlite or postgresql://user@host/name",
            )
        )
    return _kept(url)


def _kept(url: URL) -> URL:
    """Returns the address of a store that outlives the process; SQLite has others."""
    name = url.database or ""
    in_memory = not name or ":memory:" in name or url.query.get("mode") == "memory"
    if url.get_backend_name() == "sqlite" and in_memory:
        raise InputError(
            Violation(
                field="store",
                value=url.render_as_string(),
                rule="names no file: what it is given would be lost when the program ends",
                nearest_fix="write it like sqlite:///runs.sqlite",
            )
        )
    return url


def make_engine(url: URL) -> Engine:
    """Returns an engine for `url`; nothing is connected yet.

    Raises:
        InputError: the PostgreSQL driver is not installed, the file lies on a network file
            system, or its folder cannot be made.
    """
    shown = url.render_as_string(hide_password=True)
    try:
        engine = create_engine(url, json_deserializer=_json_or_text)
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise InputError(
            Violation(
                field="store",
                value=shown,
                rule=f"the database driver is missing: {error}",
                nearest_fix="pip install 'flopwright[postgres]'",
            )
        ) from error
    if url.get_backend_name() == "sqlite":
        _prepare_folder(url)
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_folder(url: URL) -> None:
    path = Path(str(url.database))
    refuse_network_file(path)
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            Violation(file=str(folder), rule=f"cannot make the folder: {error.strerror}")
        ) from error


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    # Transactions are begun by _begin_sqlite, not by the driver's guess at each statement.
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
    connection.execute("PRAGMA foreign_keys = ON")
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except Exception as error:
            # Two processes that open a new file at once: the switch to WAL takes an
            # exclusive lock and does not wait for the busy timeout.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))


@contextmanager
def transaction(engine: Engine, *, write: bool = False) -> Iterator[Connection]:
    """Yields a connection inside a transaction; what fails is rolled back.

    Args:
        engine: from `make_engine`.
        write: take SQLite's write lock at once, so that what is read stays true.

    Raises:
        InputError: the database cannot be reached, is not a database, or is damaged.
    """
    try:
        with engine.connect() as connection:
            if write and engine.dialect.name == "sqlite":
                connection = connection.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
            with connection.begin():
                yield connection
    except DBAPIError as error:
        raise InputError(_unusable(engine, error)) from error


def _unusable(engine: Engine, error: DBAPIError) -> Violation:
    shown = engine.url.render_as_string(hide_password=True)
    first_line = (
        str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else "no reason"
    )
    if engine.dialect.name == "sqlite":
        return Violation(
            file=str(engine.url.database),
            rule=f"not a usable store: {first_line}",
            nearest_fix="name another file, or move this one away and a new one is made",
        )
    return Violation(field="store", value=shown, rule=f"the database says: {first_line}")
