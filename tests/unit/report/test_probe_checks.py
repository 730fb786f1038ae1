"""Numbers that no machine has are named by their field, before anything is fitted to them."""

from __future__ import annotations

from typing import Any

import pytest

from flopwright.report.probe import ProbeReport
from flopwright.report.probe_checks import probe_violations


def probe_data() -> dict[str, Any]:
    times = {"seconds": 1e-3, "seconds_min": 9e-4, "seconds_p90": 2e-3}
    sizes = {"m": 64, "k": 64, "n": 64, "flops": 5e5, "moved_bytes": 5e4}
    machine = {
        "machine": "m",
        "processor": "p",
        "num_cores": 2,
        "world_size": 2,
        "threads_per_rank": 1,
        "memory_bytes": 2**33,
        "python": "3.11",
        "tool_version": "1",
    }
    return {
        "created": "2026-01-01",
        "fingerprint": machine,
        "host_floor_s": 1e-6,
        "operators": [{"kind": "gemm", "name": "mm", "dtype": "fp32", **sizes, **times}],
        "collectives": [
            {"collective": "all_reduce", "ranks": 2, "nbytes": 1024, "waiting_s": 0, **times}
        ],
    }


def test_a_probe_as_it_is_measured_is_left_alone() -> None:
    assert not list(probe_violations(ProbeReport.model_validate(probe_data())))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("fingerprint", "world_size"), 0),
        (("fingerprint", "world_size"), -2),
        (("fingerprint", "num_cores"), 0),
        (("fingerprint", "memory_bytes"), 0),
        (("nodes",), 3),
        (("host_floor_s",), 1e300),
        (("operators", 0, "m"), 0),
        (("operators", 0, "batch"), -1.0),
        (("operators", 0, "flops"), 1e300),
        (("operators", 0, "seconds"), 1e300),
        (("operators", 0, "seconds_min"), 1e-300),
        (("collectives", 0, "nbytes"), 1e300),
        (("collectives", 0, "seconds"), 1e300),
    ],
)
def test_a_number_that_no_machine_has_is_named(path: tuple[str | int, ...], value: float) -> None:
    data = probe_data()
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    ((where, violation),) = probe_violations(ProbeReport.model_validate(data))
    assert where == path
    assert violation.field == ".".join(map(str, path))
