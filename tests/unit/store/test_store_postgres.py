"""The store on a real PostgreSQL keeps what it keeps on SQLite, with several writers."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

from flopwright.report.metrics import Fingerprint, Measurement, StepMetrics
from flopwright.store import open_store
from flopwright.store.frame import COLUMNS


def measured(name: str) -> Measurement:
    metrics = StepMetrics(
        step_time_s=0.5,
        tokens_per_s=2048,
        tokens_per_s_per_gpu=1024,
        model_flops_per_s_per_gpu=1e9,
        mfu=0.25,
        time_s={"forward": 0.2, "backward": 0.3},
        memory_bytes=({"weights": 100},),
    )
    fingerprint = Fingerprint(
        machine="m",
        processor="p",
        num_cores=2,
        world_size=2,
        threads_per_rank=1,
        memory_bytes=2**33,
        python="3.11.7",
        tool_version="0.1.0",
    )
    return Measurement(
        id=name,
        created="2026-01-02T03:04:05+00:00",
        plan_name="dp2",
        plan={"model_hash": "m", "scenario_hash": "s"},
        metrics=metrics,
        step_time_p10_s=0.4,
        step_time_p90_s=0.6,
        step_time_samples_s=(0.5,),
        discarded_steps=0,
        fingerprint=fingerprint,
    )


def test_postgres_keeps_every_writers_records(postgres_url: str) -> None:
    prefix = uuid.uuid4().hex
    names = [f"{prefix}-{i}" for i in range(24)]

    def write(part: list[str]) -> None:
        store = open_store(postgres_url)
        for name in part:
            store.add(measured(name))
        store.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, [names[i::4] for i in range(4)]))
    store = open_store(postgres_url)
    assert store.add(measured(names[0])) is False
    found = store.measurements(ids=names)
    assert {m.id for m in found} == set(names)
    assert found[0] == measured(found[0].id)
    frame = store.frame()
    assert list(frame.columns) == list(COLUMNS)
    store.close()
