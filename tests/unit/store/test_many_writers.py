"""Processes that write at once lose nothing, on SQLite and on PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from flopwright.store import open_store

# Opens the store anew for each record, as `flopwright run` does, all kinds of records mixed.
WRITER = """
import sys, time
from flopwright.report.metrics import Fingerprint, Measurement, StepMetrics
from flopwright.report.records import RoundSample, RoundsRecord
from flopwright.report.trace import TraceEvent
from flopwright.store import open_store
url, prefix, count, start = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
step = StepMetrics(step_time_s=0.5, tokens_per_s=1.0, tokens_per_s_per_gpu=1.0,
                   model_flops_per_s_per_gpu=1.0, mfu=0.1)
machine = Fingerprint(machine="m", processor="p", num_cores=2, world_size=2, threads_per_rank=1,
                      memory_bytes=1, python="3", tool_version="0")
time.sleep(max(0.0, start - time.time()))
for i in range(count):
    store = open_store(url)
    name = f"{prefix}-{i}"
    if i % 3 == 2:
        store.add_record(RoundsRecord(id=name, created="2026", name="r", source="verl",
                                      rounds=(RoundSample(round=0, round_time_s=1.0),)))
    else:
        store.add(Measurement(id=name, created="2026", plan_name="p", plan={}, metrics=step,
                              step_time_p10_s=0.4, step_time_p90_s=0.6,
                              step_time_samples_s=(0.5,), discarded_steps=0,
                              fingerprint=machine),
                  (TraceEvent(0, "compute", "F(0,0)", "forward", 0.0, 0.5),))
    store.close()
"""


def write_together(url: str, prefixes: tuple[str, ...], count: int) -> None:
    import time

    start = time.time() + 4  # both have imported everything by then
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, url, p, str(count), str(start)])
        for p in prefixes
    ]
    try:
        assert [w.wait(timeout=150) for w in writers] == [0] * len(writers)
    finally:
        for writer in writers:
            writer.kill()


def check(url: str, prefixes: tuple[str, ...], count: int) -> None:
    store = open_store(url)
    expected = {f"{p}-{i}" for p in prefixes for i in range(count)}
    measured = {m.id for m in store.measurements()} & expected
    records = {r.id for r in store.records()} & expected
    assert measured | records == expected
    assert not measured & records
    assert all(len(store.trace(name)) == 1 for name in measured)
    store.close()


@pytest.mark.slow
def test_on_sqlite(tmp_path: Path) -> None:
    """The file is not there yet: both also try to make it."""
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    write_together(url, ("x", "y"), 30)
    check(url, ("x", "y"), 30)


@pytest.mark.slow
def test_on_postgres(postgres_url: str) -> None:
    prefixes = (uuid.uuid4().hex, uuid.uuid4().hex)
    write_together(postgres_url, prefixes, 30)
    check(postgres_url, prefixes, 30)
