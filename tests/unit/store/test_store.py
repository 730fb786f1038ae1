from __future__ import annotations

import multiprocessing
import sqlite3
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from flopwright.errors import InputError
from flopwright.report.metrics import Fingerprint, Measurement, StepMetrics
from flopwright.store import default_url, open_store
from flopwright.store.frame import COLUMNS


def make_measurement(name: str, step_time_s: float = 0.5, plan_name: str = "dp2") -> Measurement:
    return Measurement(
        id=name,
        created="2026-01-02T03:04:05+00:00",
        plan_name=plan_name,
        plan={"model_hash": "m" * 16, "scenario_hash": "s" * 16, "parallel": {"dp_shard": 2}},
        metrics=StepMetrics(
            step_time_s=step_time_s,
            tokens_per_s=1024 / step_time_s,
            tokens_per_s_per_gpu=512 / step_time_s,
            model_flops_per_s_per_gpu=1e9,
            mfu=0.25,
            time_s={"forward": 0.4 * step_time_s, "backward": 0.6 * step_time_s},
            memory_bytes=({"weights": 100, "activations": 10}, {"weights": 200, "reserved": 7}),
        ),
        step_time_p10_s=0.9 * step_time_s,
        step_time_p90_s=1.1 * step_time_s,
        step_time_samples_s=(step_time_s,) * 3,
        discarded_steps=2,
        fingerprint=Fingerprint(
            machine="m",
            processor="p",
            num_cores=2,
            world_size=2,
            threads_per_rank=1,
            memory_bytes=8 * 2**30,
            python="3.11.7",
            packages={"torch": "2.13.0"},
            tool_version="0.1.0",
        ),
        losses=(3.0, 2.5),
    )


def test_a_measurement_comes_back_equal(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'deep' / 'store.sqlite'}"
    first, second = make_measurement("a"), make_measurement("b", 0.7, "pp2")
    store = open_store(url)
    assert store.add(first)
    assert store.add(second)
    again = open_store(url)
    assert again.measurements() == [first, second]
    assert again.measurements(plan_name="pp2") == [second]
    assert again.measurements(ids=["a"], kind="measurement") == [first]
    assert again.measurements(stack_id=first.fingerprint.stack_id()) == [first, second]
    assert again.measurements(stack_id="other") == []


def test_adding_twice_changes_nothing_and_another_record_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store.sqlite"))
    assert store.add(make_measurement("a"))
    assert not store.add(make_measurement("a"))
    with pytest.raises(InputError, match="another measurement under this id"):
        store.add_all([make_measurement("b"), make_measurement("a", 0.9)])
    # the batch that failed left nothing behind
    assert [m.id for m in store.measurements()] == ["a"]
    assert store.measurements()[0].metrics.step_time_s == 0.5


def test_the_frame_has_the_documented_schema(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store.sqlite"))
    empty = store.frame()
    assert list(empty.columns) == list(COLUMNS)
    assert len(empty) == 0
    store.add(make_measurement("a"))
    frame = store.frame()
    assert dict(frame.dtypes) == dict(empty.dtypes)
    row = frame.iloc[0]
    assert row["plan"] == "dp2 mbs1"
    assert row["memory_weights_bytes"] == 200
    assert row["tensor_memory_bytes"] == 200
    assert row["time_backward_s"] == pytest.approx(0.3)
    assert row["time_idle_s"] == 0
    assert row["loss_last"] == 2.5
    assert row.isna()["held_out_loss"]
    assert row["kept_steps"] == 3


def _write_together(folder: str, prefix: str, together: Barrier) -> None:
    for round_number in range(8):
        url = f"sqlite:///{folder}/store{round_number}.sqlite"
        together.wait(60)  # neither finds the file: both try to make it
        store = open_store(url)
        for i in range(5):
            store.add(make_measurement(f"{prefix}{i}"))
        store.close()


@pytest.mark.slow
def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(2)
    workers = [
        context.Process(target=_write_together, args=(str(tmp_path), p, together))
        for p in ("x", "y")
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=180)
    assert [w.exitcode for w in workers] == [0, 0]
    expected = {f"{p}{i}" for p in ("x", "y") for i in range(5)}
    for round_number in range(8):
        found = open_store(f"sqlite:///{tmp_path}/store{round_number}.sqlite").measurements()
        assert {m.id for m in found} == expected


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database " * 100)
    before = path.read_bytes()
    with pytest.raises(InputError, match="not a usable store"):
        open_store(str(path))
    assert path.read_bytes() == before


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(InputError, match="belongs to another program"):
        open_store(str(path))
    with sqlite3.connect(path) as connection:
        names = [r[0] for r in connection.execute("SELECT name FROM sqlite_master")]
    assert names == ["songs"]


def test_a_foreign_schema_version_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE schema_version (number INTEGER)")
    with pytest.raises(InputError, match="belongs to another program"):
        open_store(str(path))


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    open_store(str(path)).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE schema_version SET version = 99")
    with pytest.raises(InputError, match="newer flopwright"):
        open_store(str(path))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    store = open_store(str(path))
    store.add_all([make_measurement(f"m{i}") for i in range(200)])
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(path.read_bytes())
    data[8192:40960] = b"\xa5" * (40960 - 8192)
    path.write_bytes(bytes(data))
    with pytest.raises(InputError, match=r"damaged|not a usable store"):
        open_store(str(path))


def test_a_record_that_no_longer_fits_is_named(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    store = open_store(str(path))
    store.add(make_measurement("a"))
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE measurements SET payload = '{}'")
    with pytest.raises(InputError, match=r"measurements\.a"):
        open_store(str(path)).measurements()


def test_a_payload_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    store = open_store(str(path))
    store.add(make_measurement("a"))
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE measurements SET payload = '{{{'")
    with pytest.raises(InputError, match=r"measurements\.a"):
        open_store(str(path)).measurements()


def test_other_databases_are_refused_with_the_two_that_work() -> None:
    with pytest.raises(InputError, match="SQLite file or a PostgreSQL"):
        open_store("mysql://host/name")


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        ":memory:",
        "sqlite:///file::memory:?cache=shared&uri=true",
        "sqlite:///file:name?mode=memory&uri=true",
    ],
)
def test_a_store_that_ends_with_the_program_is_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"names no file.*sqlite:///runs\.sqlite"):
        open_store(url)


def test_a_missing_postgres_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    with pytest.raises(InputError, match=r"flopwright\[postgres\]"):
        open_store("postgresql://localhost:1/none")


def test_an_unreachable_postgres_is_an_input_error() -> None:
    pytest.importorskip("psycopg", reason="needs the postgres extra")
    with pytest.raises(InputError, match="the database says"):
        open_store("postgresql://nobody:secret@127.0.0.1:1/none")


def test_the_default_store_follows_the_home_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOPWRIGHT_HOME", str(tmp_path))
    assert default_url() == f"sqlite:///{tmp_path}/store.sqlite"
    assert open_store().add(make_measurement("a"))
    assert (tmp_path / "store.sqlite").is_file()
