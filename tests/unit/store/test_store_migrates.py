"""A store of the first schema is brought up to date; the revisions make what the tables say."""

from __future__ import annotations

import json
import sqlite3
import uuid
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text

import flopwright.store.schema_state as schema_state
from flopwright.errors import InputError
from flopwright.report.metrics import Measurement
from flopwright.store import open_store
from flopwright.store.migrations import VERSION_TABLE
from flopwright.store.tables import STORE_SCHEMA, Base

# What `create_all` of the first schema made, as SQLite keeps it.
FIRST_SCHEMA = """
CREATE TABLE schema_version (owner VARCHAR(32) NOT NULL, version INTEGER NOT NULL,
    PRIMARY KEY (owner));
CREATE TABLE measurements (id VARCHAR(128) NOT NULL, created VARCHAR(40) NOT NULL,
    kind VARCHAR(32) NOT NULL, plan_name VARCHAR(256) NOT NULL, model_hash VARCHAR(64) NOT NULL,
    scenario_hash VARCHAR(64) NOT NULL, stack_id VARCHAR(64) NOT NULL,
    world_size BIGINT NOT NULL, step_time_s FLOAT NOT NULL, tokens_per_s FLOAT NOT NULL,
    held_out_loss FLOAT, tool_version VARCHAR(64) NOT NULL, payload JSON NOT NULL,
    PRIMARY KEY (id));
CREATE INDEX ix_measurements_created ON measurements (created);
CREATE INDEX ix_measurements_kind ON measurements (kind);
CREATE INDEX ix_measurements_plan_name ON measurements (plan_name);
CREATE INDEX ix_measurements_stack_id ON measurements (stack_id);
INSERT INTO schema_version (owner, version) VALUES ('flopwright', 1);
"""


def record(name: str) -> dict[str, Any]:
    """Returns a measurement as the first schema's version of the tool wrote it."""
    return {
        "kind": "measurement",
        "id": name,
        "created": "2026-01-02T03:04:05+00:00",
        "plan_name": "dp2",
        "plan": {"scenario": {"workload": {"kind": "pretrain"}}, "parallel": {"dp_shard": 2}},
        "metrics": {
            "step_time_s": 0.5,
            "tokens_per_s": 2048.0,
            "tokens_per_s_per_gpu": 1024.0,
            "model_flops_per_s_per_gpu": 1e9,
            "mfu": 0.25,
            "time_s": {"forward": 0.2, "backward": 0.3},
            "memory_bytes": [{"weights": 100}],
        },
        "step_time_p10_s": 0.4,
        "step_time_p90_s": 0.6,
        "step_time_samples_s": [0.5],
        "discarded_steps": 2,
        "fingerprint": {
            "machine": "m",
            "processor": "p",
            "num_cores": 2,
            "world_size": 2,
            "threads_per_rank": 1,
            "memory_bytes": 2**33,
            "python": "3.11.7",
            "packages": {},
            "tool_version": "0.1.0",
        },
        "losses": [3.0],
        "mismatch": [],
    }


def insert(names: list[str]) -> list[tuple[str, tuple[Any, ...]]]:
    statement = "INSERT INTO measurements VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)"
    rows = []
    for name in names:
        data = record(name)
        stack = Measurement.model_validate(data).fingerprint.stack_id()
        values = (name, data["created"], "measurement", "dp2", "", "", stack, 2, 0.5, 2048.0,
                  None, "0.1.0", json.dumps(data))  # fmt: skip
        rows.append((statement, values))
    return rows


def old_store(path: Path, names: list[str]) -> None:
    with sqlite3.connect(path) as connection:
        connection.executescript(FIRST_SCHEMA)
        for statement, values in insert(names):
            connection.execute(statement, values)


def test_an_old_sqlite_store_migrates_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    old_store(path, ["a", "b"])
    store = open_store(str(path))
    found = store.measurements()
    assert [m.id for m in found] == ["a", "b"]
    assert found[0].to_data() == record("a")
    # what was there before is recognised, not refused as another record
    assert store.add(found[0]) is False
    assert store.trace("a") == ()
    store.close()
    with sqlite3.connect(path) as connection:
        assert (
            connection.execute("SELECT phase, source FROM measurements").fetchall()
            == [("pretrain", "flopwright")] * 2
        )
        assert connection.execute("SELECT version FROM schema_version").fetchall() == [
            (STORE_SCHEMA,)
        ]
        assert connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall() == [
            (f"{STORE_SCHEMA:04d}",)
        ]


def test_a_migration_that_fails_leaves_the_old_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.sqlite"
    old_store(path, ["a"])
    before = sqlite3.connect(path).execute("SELECT sql FROM sqlite_master").fetchall()
    real = schema_state.upgrade

    def fails(connection: Any, *, known: int) -> None:
        real(connection, known=known)
        raise InputError("the disk is full")

    monkeypatch.setattr(schema_state, "upgrade", fails)
    with pytest.raises(InputError, match="disk is full"):
        open_store(str(path))
    assert sqlite3.connect(path).execute("SELECT sql FROM sqlite_master").fetchall() == before


def differences(url: str) -> list[Any]:
    with create_engine(url).connect() as connection:
        names = set(Base.metadata.tables)
        context = MigrationContext.configure(
            connection,
            opts={"include_name": lambda name, kind, _: kind != "table" or name in names},
        )
        return list(compare_metadata(context, Base.metadata))


def test_the_revisions_make_what_the_tables_say(tmp_path: Path) -> None:
    fresh, old = tmp_path / "fresh.sqlite", tmp_path / "old.sqlite"
    old_store(old, ["a"])
    for path in (fresh, old):
        open_store(str(path)).close()
        assert differences(f"sqlite:///{path}") == []


def test_an_old_postgres_store_migrates(postgres_url: str) -> None:
    schema = f"old_{uuid.uuid4().hex[:12]}"
    url = f"{postgres_url}?options=-csearch_path%3D{schema}"
    engine = create_engine(postgres_url)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
        connection.execute(text(f"SET search_path TO {schema}"))
        for statement in FIRST_SCHEMA.replace("FLOAT", "DOUBLE PRECISION").split(";"):
            if statement.strip():
                connection.execute(text(statement))
        for statement, values in insert(["a"]):
            connection.exec_driver_sql(statement.replace("?", "%s"), values)
    store = open_store(url)
    assert [m.id for m in store.measurements()] == ["a"]
    store.close()
    assert differences(url) == []
    with create_engine(url).connect() as connection:
        assert VERSION_TABLE in inspect(connection).get_table_names(schema)
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
