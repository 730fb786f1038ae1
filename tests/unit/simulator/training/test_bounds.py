"""What a search asks of a candidate is what the whole evaluation says of it."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.planner.space import legal_candidates
from flopwright.simulator.training.bounds import bounds
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.load import load_scenario
from flopwright.spec.scenario import Scenario, SearchSpace

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
CHOSEN = {"tp": (1, 2), "pp": (1, 2, 16), "ep": (16,), "micro_batch_size": (1, 2)}


def _scenario(zero_stage: tuple[int, ...]) -> Scenario:
    search = SearchSpace.model_validate({**CHOSEN, "zero_stage": zero_stage})
    workload = K2.workload.model_copy(update={"global_batch_size": 4096})
    return K2.model_copy(update={"search": search, "workload": workload})


@pytest.mark.parametrize("zero_stage", [(0, 1), (2, 3)])
def test_bounds_are_those_of_the_evaluation(zero_stage: tuple[int, ...]) -> None:
    scenario = _scenario(zero_stage)
    candidates = legal_candidates(scenario)
    rng = np.random.default_rng(0)
    few = candidates.take(rng.choice(len(candidates), 1500, replace=False))
    whole, quick = evaluate(scenario, few), bounds(scenario, few)
    np.testing.assert_allclose(quick.step_time_s, whole.step_time_s, rtol=1e-12)
    np.testing.assert_array_equal(quick.peak_bytes, whole.peak_bytes)
    np.testing.assert_array_equal(quick.host_bytes, whole.host_bytes)
    stages = np.asarray(sum(whole.memory_bytes.values()))
    np.testing.assert_array_equal(quick.peak_stage, stages.argmax(axis=0))
    assert len(np.unique(few.schedule)) == (6 if 1 in zero_stage else 1)  # no pipeline beside 2
    assert (few.dp_replicate > 1).any()


def test_progress_ends_at_all() -> None:
    scenario = _scenario((1,))
    candidates = legal_candidates(scenario, {"recompute": "full"})
    seen: list[tuple[int, int]] = []
    bounds(scenario, candidates, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(candidates), len(candidates))
