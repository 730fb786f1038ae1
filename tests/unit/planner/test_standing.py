"""A plan's rank is what ranking every layout by its best plan says."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.exact import replayed_step_times
from flopwright.planner.families import FOLDER, published_family
from flopwright.planner.plan_text import plan_from_text, plan_words
from flopwright.planner.ranking import layout_ids
from flopwright.planner.search import price
from flopwright.planner.space import legal_candidates
from flopwright.planner.standing import lack_text, standing
from flopwright.simulator.calibration.files import default_calibration
from flopwright.spec.load import load_scenario
from flopwright.spec.scenario import SearchSpace

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
SMALL = K2.model_copy(
    update={
        "workload": K2.workload.model_copy(update={"global_batch_size": 2048}),
        "search": SearchSpace(
            tp=(1, 2), pp=(8, 16), ep=(16, 32, 64), vpp=(1, 2), zero_stage=(1,),
            micro_batch_size=(1,), recompute=("selective", "full"), etp=(1,),
            schedule=("1f1b", "interleaved_1f1b", "dualpipe_v"), recompute_tags=(),
            recompute_layers=(), dp_replicate=(1,),
        ),
    }
)  # fmt: skip
PLAN = "pp=16 ep=16 zero=1 mbs=1 recompute=selective fp8_activations activation_offload"


def test_the_rank_equals_brute_force() -> None:
    plan, calibration = plan_from_text(PLAN, SMALL), default_calibration(SMALL.cluster.node.gpu)
    assert plan.dp == 128
    found = standing(SMALL, plan, calibration, refine=False)
    candidates = legal_candidates(SMALL)
    priced = price(SMALL, candidates, calibration)
    limit = SMALL.cluster.node.gpu.hbm_bytes * (1 - SMALL.search.memory_headroom)
    pool = np.flatnonzero(priced.fits & (priced.peak_bytes <= limit))
    exact = replayed_step_times(SMALL, candidates.take(pool), calibration)
    ids = layout_ids(candidates)[pool]
    best = {i: exact[ids == i].min() for i in np.unique(ids)}
    mine = found.prediction.metrics.step_time_s
    better = {i for i, s in best.items() if s < mine}
    assert found.fits
    assert found.proved
    assert found.layouts == len(best)
    assert found.rank == 1 + len(better) > 1
    assert found.plans == len(pool)
    assert found.plans_before >= (exact < mine).sum()
    assert found.plans_before <= found.plans
    assert len(found.better) == len(better)
    gains = [b.gain for b in found.better]
    assert gains == sorted(gains, reverse=True)
    for one in found.better:
        assert one.step_time_s < mine
        assert one.gain == pytest.approx(1 - one.step_time_s / mine)
        assert one.differs
        assert one.reason.endswith(f"({', '.join(one.differs)})")


@pytest.mark.slow
def test_the_best_plan_has_rank_one_and_nothing_before_it() -> None:
    from flopwright.planner.search import search

    best = search(SMALL, top_k=1).ranked[0].plan
    found = standing(SMALL, best, default_calibration(SMALL.cluster.node.gpu), refine=False)
    assert (found.rank, found.better, found.behind) == (1, (), 0.0)


def test_a_plan_that_lacks_memory_says_what_and_where() -> None:
    plan = plan_from_text("pp=16 ep=16 zero=1", SMALL)
    found = standing(SMALL, plan, default_calibration(SMALL.cluster.node.gpu), refine=False)
    assert not found.fits
    peak = found.prediction.metrics.peak_memory_bytes
    assert found.missing_bytes == peak - SMALL.cluster.node.gpu.hbm_bytes > 0
    assert "most is activations" in lack_text(found)
    bad = plan_from_text("pp=16 ep=7", SMALL)
    with pytest.raises(InputError, match="must divide"):
        standing(SMALL, bad, default_calibration(SMALL.cluster.node.gpu))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("zerro_stage=3", "did you mean 'zero_stage'"),
        ("pp=some", "parallel.pp"),
        ("zero=7", "parallel.zero_stage"),
        ("schedule=1f1c", "parallel.schedule"),
    ],
)
def test_words_that_are_no_plan_are_refused(text: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        plan_from_text(text, K2)


def test_words_make_a_plan() -> None:
    plan = plan_from_text(
        "tp=2 pp=16 vpp=2 dp=32 layers_per_stage=1,2x30,0 recompute_tags=norm", K2
    )
    assert (plan.tp, plan.pp, plan.vpp, plan.dp_shard) == (2, 16, 2, 32)
    assert plan.layers_per_stage == (1, *(2,) * 30, 0)
    assert (plan.recompute, plan.recompute_tags) == ("selective", ("norm",))
    assert plan.schedule == "interleaved_1f1b"


@pytest.mark.parametrize("name", sorted(p.stem for p in FOLDER.glob("*.yaml")))
def test_a_published_plan_is_sound(name: str) -> None:
    from flopwright.plan.parallel import plan_violations

    scenario, family = load_scenario(name), published_family(name)
    plan = family.plan_on(scenario)
    assert not plan_violations(plan, scenario)
    assert plan.world_size == scenario.cluster.num_gpus
    assert "arXiv" in family.source
    assert scenario.stack == "other"


def test_a_scenario_without_a_published_plan_says_which_have_one() -> None:
    with pytest.raises(InputError, match="kimi_k2_pretrain_2048gpu_h800_bf16"):
        published_family("../kimi_k2")


def test_what_a_better_plan_saves_by_class_adds_up_to_what_it_saves() -> None:
    wide = SMALL.search.model_copy(
        update={"ep": (16, 64, 128), "tp": (1,), "schedule": ("dualpipe_v",)}
    )
    workload = SMALL.workload.model_copy(update={"global_batch_size": 8192})
    scenario = SMALL.model_copy(update={"search": wide, "workload": workload})
    plan, calibration = plan_from_text(PLAN, SMALL), default_calibration(SMALL.cluster.node.gpu)
    found = standing(scenario, plan, calibration, refine=False)
    mine = found.prediction.metrics.step_time_s
    assert "dualpipe_v" in {one.plan.schedule for one in found.better}
    for one in found.better:
        assert sum(one.time_s.values()) == pytest.approx(mine - one.step_time_s, rel=1e-6)


def test_words_read_back_as_the_plan() -> None:
    plan = ParallelPlan(
        dp_shard=4,
        pp=2,
        vpp=2,
        schedule="interleaved_1f1b",
        layers_per_stage=(3, 2, 2, 1),
        recompute="selective",
        recompute_tags=("norm", "core_attn"),
        sequence_parallel=False,
        activation_offload=True,
        zero_stage=1,
    )
    assert plan_from_text(plan_words(plan), SMALL) == plan
    assert plan_from_text(plan_words(ParallelPlan()), SMALL) == ParallelPlan()
