"""The search is exact: it finds what looping over every plan finds, every time the same."""

import itertools

import numpy as np
import pytest

from flopwright.errors import InputError
from flopwright.planner import exact
from flopwright.planner.exact import finalists, replayed_step_times
from flopwright.planner.ranking import Priced, headroom, layout_ids
from flopwright.planner.search import price, search
from flopwright.planner.space import legal_candidates
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_scenario
from flopwright.spec.scenario import Scenario, SearchSpace

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
MINI = load_scenario("kimi_k2_mini_2cpu_fp32")
# Only the axes that the tests of the search itself are about.
PLAIN = {
    "schedule": ("1f1b", "interleaved_1f1b"),
    "recompute_tags": (),
    "recompute_layers": (),
    "etp": (1,),
    "dp_replicate": (1,),
}
SMALL_K2 = K2.model_copy(
    update={
        # eight micro-batches a rank at dp 128: the same code, a shorter list to replay
        "workload": K2.workload.model_copy(update={"global_batch_size": 1024}),
        "search": SearchSpace(
            tp=(1, 2),
            pp=(8, 16),
            ep=(16, 32),
            vpp=(1, 2),
            zero_stage=(1,),
            micro_batch_size=(1,),
            recompute=("selective", "full"),
            **PLAIN,
        ),
    }
)

TINY_K2 = SMALL_K2.model_copy(
    update={
        "search": SMALL_K2.search.model_copy(
            update={"tp": (1,), "ep": (16, 32), "recompute": ("selective",)}
        )
    }
)


def _with_memory(scenario: Scenario, hbm_bytes: float, headroom: float = 0.05) -> Scenario:
    node = scenario.cluster.node
    gpu = node.gpu.model_copy(update={"hbm_bytes": int(hbm_bytes)})
    cluster = scenario.cluster.model_copy(update={"node": node.model_copy(update={"gpu": gpu})})
    search_space = scenario.search.model_copy(update={"memory_headroom": headroom})
    return scenario.model_copy(update={"cluster": cluster, "search": search_space})


@pytest.mark.parametrize(
    "scenario",
    [MINI, pytest.param(TINY_K2, marks=pytest.mark.slow)],
    ids=["mini", "tiny_k2"],
)
def test_the_search_equals_a_loop_over_every_plan(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: predict each plan by itself, keep those that fit, the best of each layout.

    Plans that leave the headroom asked for go before those that only just fit.
    """
    candidates = legal_candidates(scenario)
    ids = layout_ids(candidates)
    node = scenario.cluster.node
    limit = node.gpu.hbm_bytes
    best: dict[int, tuple[bool, float]] = {}
    fit = 0
    for i in range(len(candidates)):
        one = evaluate(scenario, candidates.take([i]))
        if one.peak_bytes[0] > limit or one.host_bytes[0] > node.host_bytes:
            continue
        fit += 1
        tight = bool(one.peak_bytes[0] > limit * (1 - scenario.search.memory_headroom))
        seconds = predict(scenario, candidates.plan(i))[0].metrics.step_time_s
        layout = int(ids[i])
        best[layout] = min((tight, seconds), best.get(layout, (True, np.inf)))
    monkeypatch.setattr(exact, "BATCH", 2)  # so that the search has to know when to stop
    result = search(scenario, top_k=2)
    assert result.candidates == len(candidates)
    assert result.fit == fit
    assert result.proved
    assert result.replayed < fit
    expected = [seconds for _, seconds in sorted(best.values())[:2]]
    found = [r.prediction.metrics.step_time_s for r in result.ranked]
    assert found == pytest.approx(expected, rel=1e-9)
    assert [r.rank for r in result.ranked] == list(range(1, len(expected) + 1))


def test_replay_of_many_equals_prediction_of_each() -> None:
    candidates = legal_candidates(SMALL_K2)
    chosen = candidates.take(np.random.default_rng(0).choice(len(candidates), 12, replace=False))
    together = replayed_step_times(SMALL_K2, chosen)
    alone = [predict(SMALL_K2, chosen.plan(i))[0].metrics.step_time_s for i in range(12)]
    np.testing.assert_allclose(together, alone, rtol=1e-9)


def test_the_short_trace_gives_the_same_prediction() -> None:
    candidates = legal_candidates(SMALL_K2)
    for i in (0, len(candidates) // 2, len(candidates) - 1):
        plan = candidates.plan(i)
        whole, events = predict(SMALL_K2, plan)
        short, few = predict(SMALL_K2, plan, whole_trace=False)
        assert short == whole
        (stage,) = {e.rank for e in few}
        assert few == tuple(e for e in events if e.rank == stage)


def test_the_closed_form_never_exceeds_the_replay() -> None:
    """The bound that makes the best-first search exact."""
    candidates = legal_candidates(SMALL_K2)
    chosen = candidates.take(np.random.default_rng(1).choice(len(candidates), 96, replace=False))
    bound = evaluate(SMALL_K2, chosen).step_time_s
    replayed = replayed_step_times(SMALL_K2, chosen)
    assert (bound <= replayed * (1 + 1e-9)).all()
    assert (replayed > bound * 1.0001).any()  # it is a bound, not the same number


def test_two_searches_are_equal_in_every_field() -> None:
    assert search(SMALL_K2, top_k=3) == search(SMALL_K2, top_k=3)


def test_only_plans_that_lack_memory_are_faster_than_the_best() -> None:
    result = search(SMALL_K2, top_k=5)
    times = [r.prediction.metrics.step_time_s for r in result.ranked]
    assert times == sorted(times)
    for lacking in result.infeasible:
        assert lacking.step_time_s < times[0]
        assert lacking.missing_bytes > 0
        assert lacking.violations[0].limit == "80 GiB"


@pytest.mark.slow
def test_verdicts_follow_the_peak_of_the_leanest_plan() -> None:
    priced = price(SMALL_K2, legal_candidates(SMALL_K2))
    least = priced.peak_bytes.min()
    assert search(_with_memory(SMALL_K2, least * 1.2), top_k=1).verdict == "fits"
    tight = search(_with_memory(SMALL_K2, least * 1.02), top_k=1)
    assert tight.verdict == "tight"
    assert tight.best is not None
    assert 0 <= tight.best.headroom < 0.05
    none = search(_with_memory(SMALL_K2, least * 0.9), top_k=4)
    assert none.verdict == "does_not_fit"
    assert none.best is None
    assert none.fit == 0
    assert len(none.infeasible) == 4
    lacks = [p.missing_bytes for p in none.infeasible]
    assert lacks == sorted(lacks)
    assert lacks[0] == pytest.approx(least * 0.1, rel=1e-6)


def test_fixed_fields_restrict_the_search() -> None:
    result = search(SMALL_K2, top_k=2, fixed={"pp": 16, "recompute": "full"})
    assert {r.plan.pp for r in result.ranked} == {16}
    assert {r.plan.recompute for r in result.ranked} == {"full"}
    with pytest.raises(InputError):
        search(SMALL_K2, fixed={"pp": 5})


@pytest.mark.parametrize("seed", range(4))
def test_best_first_finds_the_best_where_bounds_mislead(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact times up to 30 % above the bound, so that the first bounds are rarely the best."""
    rng = np.random.default_rng(seed)
    candidates = legal_candidates(SMALL_K2)
    bound = rng.uniform(10, 12, len(candidates))
    truth = bound * rng.uniform(1.0, 1.3, len(candidates))
    priced = Priced(
        candidates=candidates,
        step_time_s=bound,
        peak_bytes=np.full(len(candidates), 2.0**35),
        peak_stage=np.zeros(len(candidates), np.int64),
        fits=np.ones(len(candidates), bool),
    )

    def key(chosen: Candidates, i: int) -> tuple[object, ...]:
        return tuple(chosen.plan(i).model_dump().values())

    times = {key(candidates, i): truth[i] for i in range(len(candidates))}

    def replayed(scenario: Scenario, chosen: Candidates, calibration: object) -> object:
        return np.array([times[key(chosen, i)] for i in range(len(chosen))])

    monkeypatch.setattr(exact, "replayed_step_times", replayed)
    monkeypatch.setattr(exact, "BATCH", 3)
    found = finalists(priced, SMALL_K2, 3)
    ids = layout_ids(candidates)
    best = sorted(truth[ids == layout].min() for layout in np.unique(ids))
    mine = sorted(
        found.step_time_s[ids[found.index] == layout].min()
        for layout in np.unique(ids[found.index])
    )
    assert mine[:3] == best[:3]
    assert found.proved
    assert len(found.index) < len(candidates)


def test_a_spent_budget_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "MAX_REPLAYS", 4)
    monkeypatch.setattr(exact, "BATCH", 2)
    priced = price(SMALL_K2, legal_candidates(SMALL_K2))
    found = finalists(priced, SMALL_K2, 8)
    assert len(found.index) == 4
    assert not found.proved


def test_for_cost_the_best_plan_takes_the_fewest_gpu_seconds() -> None:
    cheap = MINI.model_copy(update={"objective": "cost"})
    candidates = legal_candidates(cheap)
    value = [
        predict(cheap, candidates.plan(i))[0].metrics.step_time_s * candidates.plan(i).world_size
        for i in range(len(candidates))
    ]
    result = search(cheap, top_k=3)
    best = result.ranked[0]
    found = best.prediction.metrics.step_time_s * best.plan.world_size
    assert found == pytest.approx(min(value), rel=1e-9)
    assert {candidates.plan(i).world_size for i in range(len(candidates))} == {1, 2}
    assert best.plan.world_size == 1  # one rank has nobody to wait for


def test_progress_counts_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    search(MINI, top_k=1, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (8, 8)


def test_the_front_holds_the_fastest_and_the_leanest_plan() -> None:
    result = search(SMALL_K2, top_k=1)
    priced = price(SMALL_K2, legal_candidates(SMALL_K2))
    free = headroom(priced, SMALL_K2)[priced.fits]
    assert max(t.headroom for t in result.front) == pytest.approx(free.max())
    fastest = priced.step_time_s[priced.fits].min()
    assert min(t.step_time_s for t in result.front) == pytest.approx(fastest)
    for a, b in itertools.combinations(result.front, 2):
        assert not (a.step_time_s <= b.step_time_s and a.headroom >= b.headroom)


@pytest.mark.slow
def test_kimi_k2_fits_and_so_does_its_published_family() -> None:
    """PP16 x EP16, ZeRO-1, selective recompute, FP8 activation storage, offload."""
    published = {
        "tp": 1,
        "pp": 16,
        "ep": 16,
        "zero_stage": 1,
        "recompute": "selective",
        "fp8_activations": True,
        "activation_offload": True,
    }
    assert search(K2, top_k=3).verdict == "fits"
    result = search(K2, top_k=3, fixed=published)
    assert result.verdict == "fits"
    assert result.proved
    assert result.best is not None
    assert result.best.plan.activation_offload
