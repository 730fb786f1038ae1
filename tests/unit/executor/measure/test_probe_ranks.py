"""Two real ranks: every collective is timed, and a rank that fails is an input error."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

from flopwright.errors import InputError
from flopwright.executor.measure.probe_collectives import SIZES, CollectiveName
from flopwright.executor.measure.probe_overlap import OVERLAPPED
from flopwright.executor.measure.probe_request import ProbeRequest, run_probe_ranks
from flopwright.simulator.calibration.cluster_file import cluster_from_probe
from flopwright.simulator.calibration.fit_probe import fit_probe


@pytest.mark.slow
def test_two_ranks_measure_every_collective(tmp_path: Path) -> None:
    said: list[str] = []
    request = ProbeRequest(device="cpu", budget_s=2.0)
    report = run_probe_ranks(request, 2, tmp_path, said.append)
    assert report.fingerprint.world_size == 2
    found = {(c.collective, c.ranks, c.nbytes) for c in report.collectives}
    assert found == {(name, 2, float(n)) for name in get_args(CollectiveName) for n in SIZES}
    for c in report.collectives:
        assert 0 < c.seconds_min <= c.seconds <= c.seconds_p90
    assert any("all_reduce" in line for line in said)
    # traffic beside compute, as far as the time allowed
    assert {o.collective for o in report.overlaps} <= set(OVERLAPPED)
    assert all(0 <= s <= 1 for s in fit_probe(report).overlap_slowdown.values())
    curves = {c.collective: c for c in fit_probe(report).collectives}
    assert set(curves) == set(get_args(CollectiveName))
    link = cluster_from_probe(report).node.link
    assert link.bytes_per_s == pytest.approx(curves["send_recv"].bytes_per_s, rel=1e-3)


@pytest.mark.slow
def test_a_rank_that_fails_is_an_input_error_with_its_last_words(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the GPU that the test expects to be missing")
    with pytest.raises(InputError, match="the probe's ranks ended with code"):
        run_probe_ranks(ProbeRequest(device="cuda", budget_s=1.0), 1, tmp_path, lambda _: None)
