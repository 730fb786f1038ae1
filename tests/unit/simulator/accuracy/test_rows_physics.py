"""Silent defaults that physics refuses: by memory, by a rate above the peak."""

from __future__ import annotations

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.accuracy.defaults import Assumed
from flopwright.simulator.accuracy.defaults_physics import rough_peak_bytes, settled_recompute
from flopwright.simulator.hardware.nodes.types import cluster_of
from flopwright.spec.load import load_model
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Workload


def scenario(batch: int = 16, seq: int = 8192) -> Scenario:
    work = {"seq_len": seq, "global_batch_size": batch, "total_tokens": seq * batch * 1000}
    return Scenario(
        name="s",
        model=load_model("llama31_8b"),
        cluster=cluster_of("hgx_h100", 8),
        workload=Workload.model_validate(work),
    )


PLAN = ParallelPlan(dp_shard=8, zero_stage=3, data_parallel="fsdp2", micro_batch_size=1)
FULL = PLAN.model_copy(update={"recompute": "full"})


# 8.03e9 parameters at 18 bytes over 8 ranks: 18.1 GB; a layer saves 8 * 4096 + 4 * 4096
# + 2 * 2048 + 6 * 14336 = 139,264 bytes for each of 8,192 tokens, 32 layers: 36.5 GB; logits
# 10 * 128,256 * 8,192: 10.5 GB.
def test_the_rough_peak_is_the_sum_worked_by_hand() -> None:
    assert rough_peak_bytes(scenario(), PLAN) / 1e9 == pytest.approx(
        18.07 + 36.51 + 10.51, abs=0.1
    )
    kept = 32 * 2 * 4096 * 8192 + 139_264 * 8192
    whole = rough_peak_bytes(scenario(), FULL) / 1e9
    assert whole == pytest.approx(18.07 + kept / 1e9 + 10.51, abs=0.1)


def settled(
    plan: ParallelPlan, framework: str, step_s: float | None, memory: dict[str, float]
) -> tuple[ParallelPlan, Assumed]:
    assumed = Assumed(made=["recompute none (not stated)"])
    found = settled_recompute(scenario(), plan, framework, step_s, memory, assumed)
    return found, assumed


def test_memory_beyond_the_card_or_the_measurement_means_full_recompute() -> None:
    two = PLAN.model_copy(update={"micro_batch_size": 2})
    assert settled(PLAN, "fsdp", 8.0, {})[0].recompute == "none"
    found, assumed = settled(PLAN, "fsdp", 8.0, {"reserved": 30e9})
    assert found.recompute == "full"
    assert "recompute-by-memory" in assumed.flags
    assert assumed.made == ["full recompute: without it the run would not have fitted"]
    assert settled(two, "fsdp", 8.0, {})[0].recompute == "full"
    assert settled(two, "nemo", 8.0, {})[0].recompute == "none"


# 131,072 tokens at 57.9e9 FLOPs (71.0e9 with recompute) on 8 GPUs of 989e12: 0.85 of the peak
# is reached at 1.13 (1.39) seconds.
def test_a_rate_above_the_peak_means_no_recompute() -> None:
    assert settled(FULL, "fsdp", 1.20, {})[0].recompute == "none"
    assert settled(FULL, "fsdp", 1.60, {})[0].recompute == "full"
    assert settled(FULL, "fsdp", None, {})[0].recompute == "full"
    small = {"reserved": 30e9}
    assert settled(PLAN, "fsdp", 1.20, small)[0].recompute == "none"
