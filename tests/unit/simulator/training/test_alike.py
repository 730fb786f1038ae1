"""Many candidates priced together, by their distinct kinds, are what each is alone."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.planner.constraints import legal
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.training.candidates import SCHEDULES, Candidates, distinct
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.load import load_cluster, load_model, load_scenario
from flopwright.spec.scenario import Scenario

_DRAWN = 100_000


def _scenario() -> Scenario:
    base = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    workload = base.workload.model_copy(update={"seq_len": 512, "global_batch_size": 512})
    update = {"model": load_model("kimi_k2_mini"), "cluster": load_cluster("64_h100")}
    return base.model_copy(update={**update, "workload": workload, "objective": "cost"})


def _drawn(scenario: Scenario) -> Candidates:
    """Returns legal candidates of few layouts, so that many share one pipeline."""
    rng = np.random.default_rng(3)

    def powers(top: int) -> np.ndarray:
        return 2 ** rng.integers(0, top + 1, _DRAWN)

    def flags() -> np.ndarray:
        return rng.integers(0, 2, _DRAWN)

    zero, on_host, again = rng.integers(0, 4, _DRAWN), flags(), rng.integers(0, 3, _DRAWN)
    every = Candidates.build(
        tag_lists=(("core_attn",),),
        dp_shard=powers(3),
        dp_replicate=powers(1),
        tp=powers(1),
        cp=powers(1),
        ep=powers(3),
        pp=powers(1),
        vpp=powers(1),
        micro_batch_size=powers(1),
        schedule=rng.integers(0, len(SCHEDULES), _DRAWN),
        zero_stage=zero,
        recompute=again,
        recompute_tags=np.where((again == 1) & (flags() > 0), 0, -1),
        fp8_activations=flags(),
        activation_offload=flags(),
        optimizer_offload=on_host,
        gradient_offload=flags() * on_host * (zero >= 2),
        parameter_offload=flags() * (zero == 3),
        data_parallel=flags(),
        context_parallel=rng.integers(0, 3, _DRAWN),
    )
    return every.take(legal(every, scenario))


@pytest.mark.parametrize("hidden", [0.0, 0.7])
def test_together_is_as_alone(hidden: float) -> None:
    scenario = _scenario()
    names = ("dp_comm", "dp_gather", "ep_comm", "offload")
    calibration = default_calibration(scenario.cluster.node.gpu).model_copy(
        update={
            "hidden_share": dict.fromkeys(names, hidden),
            "memory_factors": {"activations": 1.1, "temporaries": 0.9},
            "layer_host_s": {"moe": 1e-3},
        }
    )
    candidates = _drawn(scenario)
    assert len(candidates) > 1000
    together = evaluate(scenario, candidates, calibration)
    for i in np.random.default_rng(0).permutation(len(candidates))[:40]:
        alone = evaluate(scenario, candidates.take([i]), calibration)
        stages = int(candidates.pp[i])
        np.testing.assert_allclose(together.step_time_s[i], alone.step_time_s[0], rtol=1e-12)
        np.testing.assert_allclose(together.host_bytes[i], alone.host_bytes[0], rtol=1e-12)
        for name, seconds in alone.time_s.items():
            found = together.time_s[name][i]
            np.testing.assert_allclose(found, seconds[0], atol=1e-12 * alone.step_time_s[0])
        for name, nbytes in alone.memory_bytes.items():
            found = together.memory_bytes[name][:, i]
            np.testing.assert_allclose(found[:stages], nbytes[:, 0], atol=1, err_msg=name)
            assert not found[stages:].any()
        for name, nbytes in alone.comm_bytes.items():
            found = together.comm_bytes[name][i]
            np.testing.assert_allclose(found, nbytes[0], rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("high", [3, 1000, 2**61])
def test_distinct_rows_are_those_of_unique(high: int) -> None:
    rng = np.random.default_rng(high)
    pool = rng.integers(-1, high, (40, 4))  # rows repeat whatever the range of their values
    rows = pool[rng.integers(0, len(pool), 500)]
    first, index = distinct(*rows.T)
    _, expected, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(index, inverse.reshape(-1))


def test_no_rows_have_no_kinds() -> None:
    none = np.zeros(0, np.int64)
    first, index = distinct(none, none)
    assert not len(first)
    assert not len(index)
