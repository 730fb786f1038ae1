"""Baselines by hand, and weights of runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flopwright.simulator.accuracy.baselines import (
    constant_mfu,
    constant_mfu_step_s,
    held_out_mfu_step_s,
    ideal_step_s,
    mfu_key,
    with_flat_products,
)
from flopwright.simulator.accuracy.fit_runs import fold_of, run_weights
from flopwright.simulator.accuracy.fit_terms import COMPOSED
from flopwright.simulator.accuracy.published_files import load_published
from flopwright.simulator.accuracy.run_of_row import PublishedRun
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.operators.forms import efficiency
from flopwright.spec.flops import model_flops_per_token
from flopwright.spec.load import load_gpu


@pytest.fixture(scope="module")
def run() -> PublishedRun:
    return next(
        r
        for r in load_published().runs
        if r.gpu == "h100_sxm"
        and r.scenario.workload.precision.gemm == "same"
        and r.scenario.workload.lora_rank is None
    )


def measured(run: PublishedRun, share: float, name: str = "", cell: str = "c") -> PublishedRun:
    return replace(run, id=name or run.id, cell=cell, measured_step_s=ideal_step_s(run) / share)


@pytest.mark.slow
def test_the_ideal_step_is_model_flops_over_the_dense_peak(run: PublishedRun) -> None:
    work = run.scenario.workload
    flops = work.seq_len * work.global_batch_size
    flops *= model_flops_per_token(run.scenario.model, work.seq_len)
    assert ideal_step_s(run) == pytest.approx(flops / (run.num_gpus * 989.4e12), rel=1e-3)


def test_a_constant_mfu_is_the_median_of_its_processor_and_format(run: PublishedRun) -> None:
    runs = [measured(run, share) for share in (0.3, 0.4, 0.6)]
    shares = constant_mfu(runs)
    assert shares == pytest.approx({mfu_key(run): 0.4, "": 0.4})
    assert constant_mfu_step_s(runs[0], shares) == pytest.approx(ideal_step_s(run) / 0.4)
    assert constant_mfu_step_s(runs[0], {"": 0.5}) == pytest.approx(ideal_step_s(run) / 0.5)


def test_a_run_is_not_learnt_from_by_its_own_fold(run: PublishedRun) -> None:
    runs = [measured(run, 0.2), measured(run, 0.4), measured(run, 0.5)]
    found = held_out_mfu_step_s(runs, ["a", "b", "b"])
    ideal = ideal_step_s(run)
    assert found == pytest.approx(np.array([ideal / 0.45, ideal / 0.2, ideal / 0.2]))


def test_flat_products_have_one_rate_at_any_shape() -> None:
    flat = with_flat_products(default_calibration(load_gpu("h100_sxm")))
    curve = next(c for c in flat.curves if c.kind == "gemm")
    sizes = np.array([64.0, 1024.0, 8192.0])
    shares = efficiency(curve, sizes, sizes, sizes)
    assert np.ptp(shares) == pytest.approx(0.0)
    assert 0.3 < shares[0] < 1.0


def test_a_cell_weighs_by_the_root_of_its_runs(run: PublishedRun) -> None:
    many = [measured(run, 0.4, f"m{i}", "many") for i in range(16)]
    one = measured(run, 0.4, "one", "one")
    weights = run_weights([*many, one])
    assert weights[:16].sum() == pytest.approx(4.0)
    assert weights[16] == 1.0


def test_odd_rows_and_guessed_plans_teach_nothing(run: PublishedRun) -> None:
    runs = [
        replace(run, flags=frozenset({"odd"})),
        replace(run, flags=frozenset({"own-plan"})),
        run,
    ]
    assert run_weights(runs).tolist() == [0.0, 0.0, 1.0]


def test_composed_rows_teach_little_and_are_a_stack_of_their_own(run: PublishedRun) -> None:
    composed = [replace(run, id=f"v{i}", cell="v", flags=frozenset({COMPOSED})) for i in range(60)]
    weights = run_weights([*composed, run])
    assert np.count_nonzero(weights[:60]) == 10
    assert weights[:60].sum() < 1.0 <= weights[60]
    assert fold_of(composed[0], "stack") != fold_of(run, "stack")
    assert fold_of(composed[0], "cell") == "v"
