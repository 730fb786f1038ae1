"""On small spaces with every axis the search finds what looping over every plan finds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.placement import CHUNKS_PER_STAGE
from flopwright.planner.constraints import violations
from flopwright.planner.explain import why_it_loses
from flopwright.planner.ranking import layout_ids
from flopwright.planner.search import price, search
from flopwright.planner.space import legal_candidates
from flopwright.planner.space_product import balanced_split, tail_layers
from flopwright.simulator.training.candidates import SCHEDULES
from flopwright.simulator.training.evaluate import evaluate
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_scenario
from flopwright.spec.scenario import Scenario, SearchSpace

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
LISTS = ((), ("core_attn",), ("norm", "swiglu", "mla_up", "moe_down"))


def _moonlight(objective: str = "time", **search: Any) -> Scenario:
    """Moonlight on 32 H800s: the same code as K2's 2,048, with lists that replay at once."""
    model = load_scenario_model("moonlight_16b_a3b")
    cluster = K2.cluster.model_copy(update={"num_nodes": 4})
    workload = K2.workload.model_copy(update={"global_batch_size": 64})
    space = {"micro_batch_size": (1,), "fp8_activations": (False,), "optimizer_offload": (False,)}
    return K2.model_copy(
        update={
            "model": model,
            "cluster": cluster,
            "workload": workload,
            "objective": objective,
            "search": SearchSpace.model_validate(space | search),
        }
    )


def load_scenario_model(name: str) -> Any:
    from flopwright.spec.load import load_model

    return load_model(name)


SMALL = _moonlight(
    tp=(2,), pp=(2,), ep=(4,), vpp=(1, 2), zero_stage=(1,), recompute=("selective", "full"),
    activation_offload=(False, True),
)  # fmt: skip


def _every_plan(scenario: Scenario) -> set[ParallelPlan]:
    """Every point of the axes, one plan at a time, without the planner's product."""
    layers = scenario.model.num_layers
    found = set()
    for schedule, vpp, etp, tags, depth, off, replicas in itertools.product(
        SCHEDULES, (1, 2), (1, 2), LISTS, (None, "half"), (False, True), (1, 2)
    ):
        if schedule == "gpipe" or (schedule == "zb_h1" and vpp > 1):
            continue
        least, most = CHUNKS_PER_STAGE[schedule]
        if vpp < least or (most and vpp > most):
            continue
        chunks = 2 * vpp
        splits = {None, balanced_split(layers, chunks, tail_layers(scenario.model))}
        deep = None if depth is None else (-(-layers // chunks) + 1) // 2
        for recompute, split in itertools.product(("selective", "full"), splits):
            if (recompute == "full" and tags) or (recompute != "full" and depth):
                continue
            # Without a list of its own, ZeRO-1 is replicated over the smallest whole group.
            if replicas > 1 and 8 // replicas * 2 != max(8, 4 * etp):
                continue
            plan = ParallelPlan(
                tp=2, pp=2, vpp=vpp, ep=4, etp=etp, dp_replicate=replicas,
                dp_shard=8 // replicas, zero_stage=1, schedule=schedule,
                recompute=recompute, recompute_tags=tags, recompute_layers=deep,
                activation_offload=off, layers_per_stage=split,
            )  # fmt: skip
            if not violations(plan, scenario):
                found.add(plan)
    return found


def test_the_space_equals_brute_force_over_every_axis() -> None:
    candidates = legal_candidates(SMALL)
    plans = [candidates.plan(i) for i in range(len(candidates))]
    assert len(plans) == len(set(plans))
    assert set(plans) == _every_plan(SMALL)
    assert {p.schedule for p in plans} == {*SCHEDULES} - {"gpipe"}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["time", "cost", "energy", "headroom", "gpus"])
def test_the_search_equals_a_loop_over_every_plan_for_every_objective(objective: str) -> None:
    """Oracle: predict each plan by itself; the best of each layout by the objective."""
    few = SMALL.search.model_copy(
        update={
            "schedule": ("1f1b", "interleaved_1f1b", "dualpipe_v"),
            "recompute": ("selective",),
            "recompute_tags": (("core_attn",),),
        }
    )
    scenario = SMALL.model_copy(update={"objective": objective, "search": few})
    candidates = legal_candidates(scenario)
    node = scenario.cluster.node
    whole = evaluate(scenario, candidates)
    fits = (whole.peak_bytes <= node.gpu.hbm_bytes) & (whole.host_bytes <= node.host_bytes)
    ids, best = layout_ids(candidates), {}
    for i in np.flatnonzero(fits):
        plan = candidates.plan(int(i))
        step = predict(scenario, plan, whole_trace=False)[0].metrics.step_time_s
        peak, gpus = float(whole.peak_bytes[i]), plan.world_size
        value = {
            "time": (step,),
            "cost": (gpus * step,),
            "energy": (gpus * step,),
            "headroom": (peak, step),
            "gpus": (gpus, step),
        }[objective]
        tight = bool(peak > node.gpu.hbm_bytes * (1 - scenario.search.memory_headroom))
        key = (tight, *value, step)
        best[int(ids[i])] = min(key, best.get(int(ids[i]), (True, np.inf)))
    expected = [key[-1] for key in sorted(best.values())[:3]]
    result = search(scenario, top_k=3)
    assert result.proved
    assert result.method == "exhaustive"
    found = [r.prediction.metrics.step_time_s for r in result.ranked]
    assert found == pytest.approx(expected, rel=1e-9)
    sizes = {candidates.plan(i).world_size for i in range(len(candidates))}
    assert len(sizes) == (1 if objective in ("time", "headroom") else len(sizes))


def test_energy_needs_the_power_of_the_gpu() -> None:
    gpu = SMALL.cluster.node.gpu.model_copy(update={"power_watts": None})
    node = SMALL.cluster.node.model_copy(update={"gpu": gpu})
    cluster = SMALL.cluster.model_copy(update={"node": node})
    scenario = SMALL.model_copy(update={"cluster": cluster, "objective": "energy"})
    with pytest.raises(InputError, match="power of h800_sxm is not known"):
        search(scenario, top_k=1)


def test_formats_are_searched_side_by_side() -> None:
    scenario = _moonlight(
        tp=(1,), pp=(2,), ep=(4,), vpp=(1,), zero_stage=(1,), recompute=("selective",),
        schedule=("1f1b",), recompute_tags=(), activation_offload=(False,), dp_replicate=(1,),
        etp=(1,), gemm=("same", "fp8_block", "nvfp4"),
    )  # fmt: skip
    result = search(scenario, top_k=4)
    assert {r.gemm for r in result.ranked} == {"same", "fp8_block"}  # an H800 has no FP4
    alone = {
        gemm: search(
            scenario.model_copy(
                update={"search": scenario.search.model_copy(update={"gemm": (gemm,)})}
            ),
            top_k=4,
        )
        for gemm in ("same", "fp8_block")
    }
    assert result.candidates == sum(r.candidates for r in alone.values())
    steps = sorted(p.prediction.metrics.step_time_s for r in alone.values() for p in r.ranked)
    assert [p.prediction.metrics.step_time_s for p in result.ranked] == steps[:4]
    only = scenario.search.model_copy(update={"gemm": ("nvfp4",)})
    with pytest.raises(InputError, match="none of these formats"):
        search(scenario.model_copy(update={"search": only}))


@pytest.mark.slow
def test_refined_plans_are_ranked_by_the_event_engine() -> None:
    from flopwright.simulator.engine.simulate import simulate

    plain = search(SMALL, top_k=5)
    result = search(SMALL, top_k=5, refine=True)
    assert plain.refined == 0
    assert result.refined == len(result.ranked) == len(plain.ranked) > 2
    assert {r.plan for r in plain.ranked} == {r.plan for r in result.ranked}
    times = [r.refined_step_time_s for r in result.ranked]
    assert times == sorted(times)
    for ranked in result.ranked[:2]:
        assert simulate(SMALL, ranked.plan).step_time_s == ranked.refined_step_time_s
    assert [r.rank for r in result.ranked] == list(range(1, len(times) + 1))


def test_the_front_equals_brute_force() -> None:
    result = search(SMALL, top_k=1)
    priced = price(SMALL, legal_candidates(SMALL))
    step, peak = priced.step_time_s[priced.fits], priced.peak_bytes[priced.fits]
    front = {
        (s, p)
        for s, p in zip(step, peak, strict=True)
        if not ((step <= s) & (peak <= p) & ((step < s) | (peak < p))).any()
    }
    hbm = SMALL.cluster.node.gpu.hbm_bytes
    assert {(t.step_time_s, round((1 - t.headroom) * hbm)) for t in result.front} == {
        (s, round(p)) for s, p in front
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "words"), [("gpus", "GPUs instead of"), ("headroom", "more on the fullest GPU")]
)
def test_what_a_plan_loses_is_told_by_the_objective(objective: str, words: str) -> None:
    scenario = SMALL.model_copy(update={"objective": objective})
    result = search(scenario, top_k=12)
    best, *others = result.ranked
    texts = [why_it_loses(best, other, scenario.objective) for other in others]
    assert any(words in text for text in texts), texts
    if objective == "gpus":
        sizes = [r.plan.world_size for r in result.ranked]
        assert sizes == sorted(sizes)
        assert len(set(sizes)) > 1
