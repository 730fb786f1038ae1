"""The space is exactly the legal plans of its bounds: no more, no fewer, no twins."""

import itertools

import pytest

from flopwright.errors import InputError, divisors, nearest_divisors
from flopwright.plan.parallel import ParallelPlan, even_split, plan_violations
from flopwright.planner import search as search_module
from flopwright.planner import space as space_module
from flopwright.planner.constraints import violations
from flopwright.planner.explain import verdict_text
from flopwright.planner.search import search
from flopwright.planner.space import (
    legal_candidates,
    light_ends_split,
    rule_counts,
    sampled_of,
)
from flopwright.planner.space_product import balanced_split, tail_layers
from flopwright.spec.load import load_scenario
from flopwright.spec.scenario import Scenario, SearchSpace

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
MINI = load_scenario("kimi_k2_mini_2cpu_fp32")


def _plans(scenario: Scenario, **fixed: int | str | bool) -> list[ParallelPlan]:
    candidates = legal_candidates(scenario, fixed)
    return [candidates.plan(i) for i in range(len(candidates))]


def test_the_mini_space_equals_brute_force_over_every_plan() -> None:
    expected = set()
    for dp, tp, pp, vpp, ep, zero in itertools.product(
        (1, 2), (1, 2), (1, 2), (1, 2, 3, 4), (1, 2), (0, 1)
    ):
        chunks = pp * vpp
        splits: set[tuple[int, ...] | None] = {None}
        if 1 < chunks <= MINI.model.num_layers:
            light = light_ends_split(MINI.model.num_layers, chunks)
            if light != even_split(MINI.model.num_layers, chunks):
                splits.add(light)
        for layers in splits:
            plan = ParallelPlan(
                dp_shard=dp,
                tp=tp,
                pp=pp,
                vpp=vpp,
                ep=ep,
                zero_stage=zero,
                micro_batch_size=4,
                schedule="interleaved_1f1b" if vpp > 1 else "1f1b",
                layers_per_stage=layers,
            )
            if not violations(plan, MINI):
                expected.add(plan)
    found = _plans(MINI)
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_the_three_demo_plans_are_candidates() -> None:
    labels = {p.label() for p in _plans(MINI)}
    assert {"dp2 zero1 mbs4", "pp2 dp1 mbs4", "ep2 dp2 zero1 mbs4"} <= labels


def test_every_k2_candidate_is_legal_and_the_published_family_is_there() -> None:
    candidates = legal_candidates(K2)
    for i in range(0, len(candidates), 997):
        plan = candidates.plan(i)
        assert not plan_violations(plan, K2)
        assert plan.world_size == 2048
    published = _plans(
        K2,
        pp=16,
        ep=16,
        zero_stage=1,
        recompute="selective",
        fp8_activations=True,
        activation_offload=True,
    )
    splits = {p.layers_per_stage for p in published if p.vpp == 1}
    # The head weighs two of K2's layers: the last stage may hold two less.
    assert splits == {None, (3, *(4,) * 14, 2)}


def test_search_lists_bound_the_space() -> None:
    search = SearchSpace(
        tp=(2,), pp=(8, 16), ep=(8,), vpp=(1,), micro_batch_size=(2,), recompute=("full",)
    )
    plans = _plans(K2.model_copy(update={"search": search}))
    assert {p.tp for p in plans} == {2}
    assert {p.pp for p in plans} == {8, 16}
    assert {p.ep for p in plans} == {8}
    assert {p.micro_batch_size for p in plans} == {2}
    assert {p.recompute for p in plans} == {"full"}


def test_fixed_fields_hold_and_may_leave_the_lists() -> None:
    plans = _plans(K2, pp=16, micro_batch_size=4, recompute="full", optimizer_offload=True, ep=16)
    assert plans
    assert all(p.pp == 16 and p.micro_batch_size == 4 for p in plans)
    assert all(p.recompute == "full" and p.optimizer_offload for p in plans)
    assert all(p.dp == 64 for p in _plans(K2, dp=64, ep=16, recompute="none"))


@pytest.mark.parametrize(
    ("fixed", "fields"),
    [
        ({"pp": 3}, {"parallel.world_size"}),
        ({"tp": 3}, {"parallel.tp", "parallel.world_size"}),
        ({"ep": 7}, {"parallel.ep"}),
        ({"pp": 16, "dp": 16}, set()),
        ({"pp": 16, "dp": 16, "tp": 1}, {"parallel.world_size"}),
        ({"pp": 2, "zero_stage": 3}, {"parallel.zero_stage"}),
        ({"schedule": "gpipe", "vpp": 2}, {"parallel.schedule"}),
    ],
)
def test_impossible_fixed_fields_name_each_rule(fixed, fields) -> None:
    if not fields:
        assert _plans(K2, **fixed)
        return
    with pytest.raises(InputError) as caught:
        legal_candidates(K2, fixed)
    assert fields <= {v.field for v in caught.value.violations}
    assert any(v.nearest_fix for v in caught.value.violations)


@pytest.mark.parametrize(
    ("fixed", "text"),
    [
        ({"recompute": "selectiv"}, "did you mean 'selective'"),
        ({"microbatch": 1}, "did you mean 'micro_batch_size'"),
        ({"zero_stage": 4}, "0 to 3"),
        ({"pp": 0}, "1 to 10000000"),
    ],
)
def test_wrong_fixed_fields_are_refused(fixed, text) -> None:
    with pytest.raises(InputError, match=text):
        legal_candidates(K2, fixed)


def test_light_ends_split_is_k2s() -> None:
    assert light_ends_split(61, 16) == (3, *(4,) * 13, 3, 3)
    assert light_ends_split(60, 16) == (3, *(4,) * 12, 3, 3, 3)
    assert light_ends_split(64, 16) == (4,) * 16
    for layers, chunks in itertools.product(range(1, 40), range(1, 12)):
        if chunks <= layers:
            split = light_ends_split(layers, chunks)
            assert sum(split) == layers
            assert len(split) == chunks
            assert max(split) - min(split) <= 1


def test_a_balanced_split_takes_from_the_last_chunk_what_its_tail_weighs() -> None:
    assert balanced_split(61, 16, 2.1) == (3, *(4,) * 14, 2)
    assert balanced_split(61, 32, 4.2) == (1, *(2,) * 30, 0)
    assert balanced_split(32, 4, 0.0) == (8, 8, 8, 8)
    assert tail_layers(K2.model) == pytest.approx(2.348, abs=1e-3)
    for layers, chunks, tail in itertools.product((7, 31, 61), (2, 5, 7), (0.0, 0.7, 2.0, 9.0)):
        split = balanced_split(layers, chunks, tail)
        assert sum(split) == layers
        assert len(split) == chunks
        assert min(split) >= 0
        assert split[-1] + tail <= max(split) + 1 or split[-1] == 0


def test_fixed_lists_and_finer_axes_hold() -> None:
    few = {"pp": 16, "ep": 16, "tp": 2, "schedule": "1f1b", "zero_stage": 1}
    plans = _plans(K2, **few, etp=2, recompute="selective", recompute_tags="norm,moe_down")
    assert plans
    assert {p.recompute_tags for p in plans} == {("norm", "moe_down")}
    assert {p.etp for p in plans} == {2}
    deep = _plans(K2, **few, recompute="full", recompute_layers=1)
    assert {p.recompute_layers for p in deep} == {1}
    every = _plans(K2, **few, recompute="full")
    assert {p.recompute_layers for p in every} == {None, 2}
    with pytest.raises(InputError, match="did you mean 'norm'"):
        legal_candidates(K2, {"recompute_tags": "norms"})


def test_long_contexts_are_cut_in_every_way() -> None:
    long = K2.model_copy(update={"workload": K2.workload.model_copy(update={"seq_len": 16384})})
    plans = _plans(long, pp=16, ep=16, tp=1, zero_stage=1, recompute="full", schedule="1f1b")
    assert {(p.cp, p.context_parallel) for p in plans} == {
        (1, "ring"),
        *itertools.product((2, 4), ("ring", "all_gather", "ulysses")),
    }


def test_hybrid_sharding_appears_under_zero_only() -> None:
    search = SearchSpace(zero_stage=(0, 1, 3), pp=(1,), tp=(8,), micro_batch_size=(1,))
    plans = _plans(K2.model_copy(update={"search": search}))
    assert {p.zero_stage for p in plans if p.dp_replicate > 1} == {1, 3}
    smallest = [p for p in plans if p.dp_replicate > 1 and p.zero_stage == 1]
    assert all(p.dp_shard * p.cp * p.tp == max(8, p.ep * p.etp) for p in smallest)
    labels = [p.label() for p in plans]
    assert len(set(labels)) == len(labels)  # replicas stand in the label


def test_cost_tries_smaller_clusters() -> None:
    plans = _plans(K2.model_copy(update={"objective": "cost"}), pp=16, ep=16, tp=1)
    assert {p.world_size for p in plans} == {2048, 1024, 512, 256}


def test_rule_counts_name_every_rule() -> None:
    counts = rule_counts(K2)
    assert counts["chunks"] > 0
    assert counts["heads"] == 0


@pytest.mark.parametrize("value", [10**20, 2**63 - 1, 2**31, 10**9])
@pytest.mark.parametrize("name", ["tp", "pp", "cp", "ep", "vpp", "dp", "dp_replicate"])
def test_a_huge_value_is_out_of_range(name: str, value: int) -> None:
    with pytest.raises(InputError, match=r"out of range \(limit: 1 to 10000000\)"):
        legal_candidates(K2, {name: value})


def test_values_whose_product_wraps_are_refused() -> None:
    with pytest.raises(InputError, match="must not exceed the cluster's GPUs"):
        legal_candidates(K2, {"tp": 2**16, "pp": 2**16, "cp": 2**16, "dp": 2**16})
    most = SearchSpace(tp=(10**7,), pp=(10**7,))
    with pytest.raises(InputError, match="must not exceed the cluster's GPUs"):
        legal_candidates(K2.model_copy(update={"search": most}), {"cp": 10**7})


def test_a_value_that_stands_twice_counts_once() -> None:
    once = SearchSpace(tp=(1, 2), pp=(8,), recompute=("full",), zero_stage=(1,))
    twice = SearchSpace(tp=(1, 2, 1), pp=(8, 8), recompute=("full", "full"), zero_stage=(1, 1, 1))
    assert len(legal_candidates(K2.model_copy(update={"search": once}))) == len(
        legal_candidates(K2.model_copy(update={"search": twice}))
    )


def test_more_combinations_than_memory_holds_are_refused() -> None:
    wide = SearchSpace(micro_batch_size=tuple(range(1, 100_001)))
    with pytest.raises(InputError, match=r"shorten search.micro_batch_size \(100000 values\)"):
        legal_candidates(K2.model_copy(update={"search": wide}))


def test_divisors_are_all_and_only_the_divisors() -> None:
    for n in range(1, 400):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
    assert divisors(2**31) == [2**k for k in range(32)]
    assert list(nearest_divisors(3, 2**31)) == [2, 4]


def test_of_too_many_candidates_the_same_sample_is_drawn_and_the_result_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = SearchSpace(tp=(1, 2), pp=(8, 16), ep=(16,), vpp=(1,), micro_batch_size=(1,))
    small = K2.model_copy(update={"search": space})
    whole = legal_candidates(small)
    points = sampled_of(small)
    assert points == 0
    monkeypatch.setattr(space_module, "MAX_PRICED", len(whole) // 3)
    drawn = legal_candidates(small)
    again = legal_candidates(small)
    plans = [drawn.plan(i) for i in range(0, len(drawn), 7)]
    assert plans == [again.plan(i) for i in range(0, len(again), 7)]
    assert 0 < len(drawn) <= len(whole) // 3
    assert sampled_of(small) >= len(whole)
    every = {whole.plan(i) for i in range(len(whole))}
    assert set(plans) <= every
    monkeypatch.setattr(search_module, "MAX_PRICED", len(whole) // 3)
    result = search(small, top_k=1)
    assert result.method == "sampled"
    assert "sampled from" in verdict_text(result, small)
