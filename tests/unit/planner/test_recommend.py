"""Recommendations against brute force over every size, and against planning by hand."""

import dataclasses
import itertools

import pytest

from flopwright.errors import InputError
from flopwright.planner import laws
from flopwright.planner.recommend_answer import Means
from flopwright.planner.recommend_gpus import fewest_gpus
from flopwright.planner.recommend_limits import (
    largest_batch,
    largest_model,
    longest_context,
    with_context,
)
from flopwright.planner.recommend_optimal import (
    compute_optimal,
    compute_optimal_for_gpu_days,
)
from flopwright.planner.recommend_rates import vocabulary_options
from flopwright.planner.recommend_room import room
from flopwright.planner.recommend_scale import counted_params, nearest_scaled, scaled
from flopwright.planner.recommend_sizes import Goal, node_counts, with_nodes
from flopwright.planner.search import search
from flopwright.planner.space import legal_candidates
from flopwright.planner.whole_run import whole_run
from flopwright.simulator.calibration.files import default_calibration
from flopwright.spec.cluster import LinkSpec
from flopwright.spec.load import load_model, load_scenario
from flopwright.spec.parameters import num_params
from flopwright.spec.scenario import Scenario, SearchSpace

pytestmark = pytest.mark.slow

MINI = load_scenario("kimi_k2_mini_2cpu_fp32")
MEANS = Means(calibration=default_calibration(MINI.cluster.node.gpu))
DAY_S = 86_400.0


def _networked(price: float = 1.0) -> Scenario:
    link = LinkSpec(name="ether", bandwidth="1 GB/s", latency="200 us", source="assumed")
    cluster = MINI.cluster.model_copy(update={"network": link, "price_usd_per_gpu_h": price})
    search_space = MINI.search.model_copy(update={"micro_batch_size": (1, 4), "zero_stage": (1,)})
    return MINI.model_copy(update={"cluster": cluster, "search": search_space})


def _small_memory(hbm_bytes: int) -> Scenario:
    gpu = MINI.cluster.node.gpu.model_copy(update={"hbm_bytes": hbm_bytes})
    node = MINI.cluster.node.model_copy(update={"gpu": gpu})
    cluster = MINI.cluster.model_copy(update={"node": node})
    space = SearchSpace(zero_stage=(1,), recompute=("none", "full"), vpp=(1,))
    return MINI.model_copy(update={"cluster": cluster, "search": space})


NETWORKED = _networked()
SIZES = list(range(1, 9))


@pytest.fixture(scope="module")
def runs() -> dict[int, tuple[float, float]]:
    """Seconds and dollars of the whole run by number of nodes, every size planned."""
    found = {}
    for nodes in SIZES:
        scenario = with_nodes(NETWORKED, nodes)
        try:
            best = search(scenario, MEANS.calibration, 1).best
        except InputError:
            continue
        assert best is not None
        run = whole_run(scenario, best.prediction)
        assert run.usd is not None
        found[nodes] = (run.days * DAY_S, run.usd)
    return found


def test_no_size_with_a_legal_plan_is_left_out(runs: dict[int, tuple[float, float]]) -> None:
    assert set(runs) <= set(node_counts(NETWORKED, max(SIZES)))


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.01, 0.55, 0.35])
def test_fewest_gpus_equals_planning_every_size(
    runs: dict[int, tuple[float, float]], share: float
) -> None:
    deadline = share * runs[1][0]
    expected = [n for n in sorted(runs) if runs[n][0] <= deadline]
    for every in (False, True):
        goal = Goal(deadline_s=deadline, max_gpus=2 * max(SIZES), every_size=every)
        found = fewest_gpus(NETWORKED, goal, MEANS)
        assert found.found == bool(expected)
        if expected:
            assert found.value == 2 * expected[0]
            assert found.run is not None
            assert found.run.days * DAY_S == pytest.approx(runs[expected[0]][0])
            assert found.binding
        tried = {a.value: a for a in found.attempts if a.days is not None}
        for gpus, attempt in tried.items():
            assert attempt.days is not None
            seconds, best = attempt.days * DAY_S, runs[int(gpus) // 2][0]
            if attempt.narrowed:
                assert not every
                assert seconds >= best * (1 - 1e-9)
            else:
                assert seconds == pytest.approx(best)
            assert attempt.holds == (seconds <= deadline)
            assert attempt.holds or "too long" in attempt.why


@pytest.mark.slow
def test_a_shorter_deadline_never_takes_fewer_gpus(runs: dict[int, tuple[float, float]]) -> None:
    needed = []
    for share in (1.2, 0.8, 0.5):
        goal = Goal(deadline_s=share * runs[1][0], max_gpus=16)
        needed.append(fewest_gpus(NETWORKED, goal, MEANS).value or float("inf"))
    assert needed == sorted(needed)
    middle = Goal(deadline_s=0.8 * runs[1][0], max_gpus=16)
    sure = fewest_gpus(NETWORKED, dataclasses.replace(middle, sure=True), MEANS)
    assert (sure.value or float("inf")) >= needed[1]


def test_what_is_missing_is_told_at_the_nearest(runs: dict[int, tuple[float, float]]) -> None:
    fastest = min(seconds for seconds, _ in runs.values())
    found = fewest_gpus(NETWORKED, Goal(deadline_s=0.9 * fastest, max_gpus=16), MEANS)
    assert not found.found
    assert "too long" in found.missing
    impossible = fewest_gpus(NETWORKED, Goal(deadline_s=1e-3, max_gpus=16), MEANS)
    assert not impossible.found
    assert "peak" in impossible.missing
    assert not any(a.days for a in impossible.attempts)  # nothing had to be planned


def test_a_budget_is_kept_and_needs_a_price(runs: dict[int, tuple[float, float]]) -> None:
    usd = runs[1][1]
    found = fewest_gpus(NETWORKED, Goal(budget_usd=1.001 * usd), MEANS)
    assert found.value == 2
    least = min(cost for _, cost in runs.values())
    none = fewest_gpus(NETWORKED, Goal(budget_usd=0.9 * least, max_gpus=8), MEANS)
    assert not none.found
    assert "too much" in none.missing
    with pytest.raises(InputError, match="price"):
        fewest_gpus(MINI, Goal(budget_usd=1.0), MEANS)


@pytest.mark.slow
def test_more_nodes_where_one_lacks_memory() -> None:
    """One node cannot hold it; the answer says by how much and is the first that can."""
    scenario = NETWORKED
    gpu = scenario.cluster.node.gpu.model_copy(update={"hbm_bytes": 30 * 2**20})
    node = scenario.cluster.node.model_copy(update={"gpu": gpu})
    cluster = scenario.cluster.model_copy(update={"node": node})
    scenario = scenario.model_copy(update={"cluster": cluster})
    fits = [n for n in (1, 2, 4) if search(with_nodes(scenario, n), MEANS.calibration, 1).best]
    assert fits
    assert fits[0] > 1
    found = fewest_gpus(scenario, Goal(deadline_s=1e6, max_gpus=8), MEANS)
    assert found.value == 2 * fits[0]
    assert found.attempts[0].missing_bytes > 0
    assert "lacks" in found.attempts[0].why


def test_the_lightest_plans_decide_as_all_plans_do() -> None:
    for hbm in (60, 80, 100, 120, 160):
        scenario = _small_memory(hbm * 2**20)
        light, every = room(scenario, MEANS), room(scenario, MEANS, "all")
        assert light.fits == every.fits


def test_the_longest_context_is_the_last_that_fits() -> None:
    scenario = _small_memory(110 * 2**20)
    found = longest_context(scenario, MEANS)
    step = scenario.workload.seq_len // 4
    by_hand = [
        seq
        for seq in range(step, 2048, step)
        if room(with_context(scenario, seq), MEANS, "all").fits
    ]
    assert found.value == max(by_hand)
    assert found.plan is not None
    assert found.plan.headroom >= scenario.search.memory_headroom
    assert found.scenario is not None
    kept = scenario.workload.tokens_per_step
    assert found.scenario.workload.tokens_per_step <= kept


def test_the_largest_micro_batch_equals_trying_each() -> None:
    scenario = _small_memory(90 * 2**20)
    found = largest_batch(scenario, MEANS)
    by_hand = []
    for size in (1, 2, 4, 8, 16):
        space = scenario.search.model_copy(update={"micro_batch_size": (size,)})
        if room(scenario.model_copy(update={"search": space}), MEANS, "all").fits:
            by_hand.append(size)
    assert found.value == max(by_hand)
    assert max(by_hand) < 16
    assert found.plan is not None
    assert found.plan.plan.micro_batch_size == max(by_hand)


def test_the_largest_model_is_the_last_that_fits() -> None:
    scenario = _small_memory(150 * 2**20)
    found = largest_model(scenario, MEANS)
    sizes = [num_params(scaled(scenario.model, n)) for n in range(1, 13)]
    fits = [
        room(scenario.model_copy(update={"model": scaled(scenario.model, n)}), MEANS, "all").fits
        for n in range(1, 13)
    ]
    assert fits == sorted(fits, reverse=True)  # larger never fits again
    assert found.value == sizes[sum(fits) - 1]
    assert not longest_context(_small_memory(4 * 2**20), MEANS).found


@pytest.mark.parametrize("name", ["kimi_k2", "llama31_8b", "qwen3_30b_a3b", "gpt3_175b"])
def test_scaled_models_keep_their_familys_proportions(name: str) -> None:
    own = load_model(name)
    assert scaled(own, own.num_layers) is own
    double = scaled(own, 2 * own.num_layers)
    assert double.hidden_size == 2 * own.hidden_size
    assert double.mlp.intermediate_size == 2 * own.mlp.intermediate_size
    assert double.attention.num_heads == 2 * own.attention.num_heads
    counts = [counted_params(scaled(own, n)) for n in range(1, own.num_layers + 4)]
    assert all(a < b for a, b in itertools.pairwise(counts))
    target = 1.3 * counted_params(own)
    nearest = counted_params(nearest_scaled(own, target))
    assert nearest / target == pytest.approx(1, abs=0.15)


def test_llama_scaled_up_is_near_the_familys_own_large_model() -> None:
    """Llama 3.1 70B has 80 layers and hidden size 8,192; scaled from 8B by depth alone."""
    found = nearest_scaled(load_model("llama31_8b"), 70.55e9)
    assert found.num_layers == pytest.approx(80, rel=0.2)
    assert found.hidden_size == pytest.approx(8192, rel=0.2)


def test_compute_optimal_spends_the_budget() -> None:
    flops = 1e15
    found = compute_optimal(MINI, laws.REFIT, MEANS, flops=flops)
    assert found.found
    assert found.optimum is not None
    assert found.scenario is not None
    params, tokens = laws.REFIT.optimum(flops)
    assert (found.optimum.params, found.optimum.tokens) == (params, tokens)
    spent = 6 * counted_params(found.scenario.model) * found.scenario.workload.total_tokens
    assert spent == pytest.approx(flops, rel=1e-5)
    assert any("hoffmann" in text for text in found.assumptions)
    assert any("active" in text for text in found.assumptions)  # it is a mixture of experts
    assert laws.REFIT.source in found.sources
    assert legal_candidates(found.scenario)
    with pytest.raises(InputError, match="one step"):
        compute_optimal(MINI, laws.REFIT, MEANS, flops=1e6)


def test_gpu_days_come_back_as_gpu_days() -> None:
    found = compute_optimal_for_gpu_days(MINI, laws.REFIT, MEANS, gpu_days=0.5)
    assert found.run is not None
    assert found.run.gpu_hours / 24 == pytest.approx(0.5, rel=0.05)


def test_a_vocabulary_trades_weights_for_context() -> None:
    model = load_model("llama31_8b")
    options = vocabulary_options(model, 8192)
    own = next(o for o in options if o.vocab_size == model.vocab_size)
    assert own.seq_len == 8192
    assert own.flops_per_text == pytest.approx(1)
    assert own.params == 2 * model.vocab_size * model.hidden_size
    pairs = itertools.pairwise(options)
    assert all(a.params < b.params and a.seq_len >= b.seq_len for a, b in pairs)
    assert {o.why for o in options} >= {"the model's own", "optimal by isoFLOP curves"}
