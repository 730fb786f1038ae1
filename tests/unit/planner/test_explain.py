"""Words: the verdict, what binds the best plan, why the next ones lose."""

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.explain import (
    binding_constraint,
    largest_class,
    verdict_text,
    why_it_loses,
)
from flopwright.planner.result import RankedPlan, SearchResult
from flopwright.planner.search import search
from flopwright.planner.sensitivity import STEP, sensitivities
from flopwright.report.metrics import StepMetrics
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.load import load_scenario
from flopwright.spec.scenario import Scenario

MINI = load_scenario("kimi_k2_mini_2cpu_fp32")
RESULT = search(MINI, top_k=7)
CALIBRATION = default_calibration(MINI.cluster.node.gpu)


def _mini_with(hbm_bytes: int) -> Scenario:
    node = MINI.cluster.node
    gpu = node.gpu.model_copy(update={"hbm_bytes": hbm_bytes})
    cluster = MINI.cluster.model_copy(update={"node": node.model_copy(update={"gpu": gpu})})
    return MINI.model_copy(update={"cluster": cluster})


def _with_times(ranked: RankedPlan, **time_s: float) -> RankedPlan:
    metrics = ranked.prediction.metrics
    changed: StepMetrics = metrics.model_copy(
        update={"time_s": time_s, "step_time_s": sum(time_s.values())}
    )
    prediction = ranked.prediction.model_copy(update={"metrics": changed})
    return ranked.model_copy(update={"prediction": prediction})


def test_verdict_of_what_fits_counts_the_candidates() -> None:
    text = verdict_text(RESULT, MINI)
    assert text.startswith("fits: kimi_k2_mini on 2 x cpu_core, 99 % of its memory free")
    assert "exhaustive: 8 candidates, 8 fit" in text


def test_verdict_without_a_proof_does_not_say_exhaustive() -> None:
    text = verdict_text(RESULT.model_copy(update={"proved": False}), MINI)
    assert "exhaustive" not in text


def _least_peak() -> int:
    return min(r.prediction.metrics.peak_memory_bytes for r in RESULT.ranked)


def test_verdict_of_a_tight_fit_names_the_headroom() -> None:
    scenario = _mini_with(int(_least_peak() * 1.02))
    text = verdict_text(search(scenario, top_k=1), scenario)
    assert text.startswith("fits with less than 5 % headroom: ")
    assert "2 % of its memory free" in text


def test_verdict_of_what_does_not_fit_says_what_is_missing() -> None:
    scenario = _mini_with(_least_peak() // 2)
    result = search(scenario, top_k=3)
    text = verdict_text(result, scenario)
    assert text.startswith("does not fit: ")
    assert "lacks" in text
    assert "on stage" in text
    assert binding_constraint(result, scenario, CALIBRATION) == ()


def test_sensitivities_of_a_lone_rank_are_all_on_the_processor() -> None:
    """Without communication, compute, bandwidth and floor explain the whole step."""
    one = MINI.cluster.node.model_copy(update={"gpus": 1})
    alone = MINI.model_copy(update={"cluster": MINI.cluster.model_copy(update={"node": one})})
    plan = search(alone, top_k=1).ranked[0].plan
    found = {s.role: s for s in sensitivities(alone, plan, CALIBRATION)}
    assert found["node link"].share == pytest.approx(0.0, abs=1e-9)
    tenths = sum(s.tenth for s in found.values()) / (1 - 1 / STEP)
    assert tenths == pytest.approx(1.0, abs=0.02)
    assert found["compute"].share > found["launch floor"].share >= 0


K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
OFFLOADED = ParallelPlan(
    pp=16,
    dp_shard=128,
    ep=16,
    zero_stage=1,
    recompute="selective",
    fp8_activations=True,
    activation_offload=True,
)


def _with_host_link(**changes: object) -> Scenario:
    node = K2.cluster.node
    assert node.host_link is not None
    link = node.host_link.model_copy(update=changes)
    cluster = K2.cluster.model_copy(update={"node": node.model_copy(update={"host_link": link})})
    return K2.model_copy(update={"cluster": cluster})


def test_a_share_is_what_an_infinite_resource_saves_and_no_more() -> None:
    """Offload hides behind compute: a tenth faster PCIe extrapolated claims several times it."""
    calibration = default_calibration(K2.cluster.node.gpu)
    host = next(s for s in sensitivities(K2, OFFLOADED, calibration) if s.role == "host link")
    one = Candidates.from_plans((OFFLOADED,))
    free = _with_host_link(bytes_per_s=1e30, latency_s=0.0)
    saved = 1 - float(
        evaluate(free, one, calibration).step_time_s[0]
        / evaluate(K2, one, calibration).step_time_s[0]
    )
    assert host.share == pytest.approx(saved, rel=1e-6)
    extrapolated = host.tenth / (1 - 1 / STEP)
    assert extrapolated > 0.3
    assert host.share < extrapolated / 4


@pytest.mark.slow
def test_links_keep_rows_of_their_own_whatever_they_are_called() -> None:
    calibration = default_calibration(K2.cluster.node.gpu)
    plain = sensitivities(K2, OFFLOADED, calibration)
    for name in (K2.cluster.node.link.name, "compute", "bubble"):
        found = sensitivities(_with_host_link(name=name), OFFLOADED, calibration)
        assert [(s.role, s.share) for s in found] == [(s.role, s.share) for s in plain]
        assert found[-1].name == name


def test_a_slow_link_becomes_the_binding_constraint() -> None:
    node = MINI.cluster.node
    slow = node.link.model_copy(update={"bytes_per_s": 1e6})
    cluster = MINI.cluster.model_copy(update={"node": node.model_copy(update={"link": slow})})
    scenario = MINI.model_copy(update={"cluster": cluster})
    calibration = CALIBRATION.model_copy(update={"collectives": ()})
    result = search(scenario, calibration, top_k=1)
    first = binding_constraint(result, scenario, calibration)[0]
    assert first.kind == "node link"
    assert "10 % faster node link (loopback)" in first.text
    assert first.share > 0.5


def test_memory_binds_where_a_faster_plan_lacks_it() -> None:
    best = RESULT.ranked[0]
    scenario = _mini_with(best.prediction.metrics.peak_memory_bytes - 1)
    result = search(scenario, top_k=3)
    assert result.infeasible
    assert result.infeasible[0].plan == best.plan
    kinds = [b.kind for b in binding_constraint(result, scenario, CALIBRATION)]
    gain = 1 - best.prediction.metrics.step_time_s / (
        result.ranked[0].prediction.metrics.step_time_s
    )
    assert ("memory" in kinds) == (gain >= 0.02)


def test_bindings_are_sorted_and_shares_are_shares() -> None:
    found = binding_constraint(RESULT, MINI, CALIBRATION)
    shares = [b.share for b in found]
    assert shares == sorted(shares, reverse=True)
    assert all(-1e-6 <= s <= 1 for s in shares)
    assert found[0].kind == "compute"


def test_a_loser_names_the_two_classes_that_grew_most() -> None:
    best = _with_times(RESULT.ranked[0], forward=1.0, backward=2.0, idle=0.0)
    other = _with_times(RESULT.ranked[1], forward=1.0, backward=2.1, idle=0.5, ep_comm=0.3)
    assert why_it_loses(best, other) == (
        "+30.0 %: pipeline bubble and waiting +500 ms, expert exchange +300 ms"
    )


def test_for_cost_gpus_count() -> None:
    best = _with_times(RESULT.ranked[0], forward=2.0)
    wide = best.plan.model_copy(update={"dp_shard": 4 * best.plan.dp_shard})
    other = _with_times(RESULT.ranked[1], forward=1.0).model_copy(update={"plan": wide})
    assert why_it_loses(best, other).startswith("-50.0 %")
    assert why_it_loses(best, other, "cost") == "+100.0 %: forward compute +2 s"


def test_noise_is_no_reason() -> None:
    best = _with_times(RESULT.ranked[0], forward=1.0, idle=0.0)
    other = _with_times(RESULT.ranked[1], forward=1.0, idle=1e-9)
    assert why_it_loses(best, other) == "+0.0 %"


def test_largest_class_is_that_of_the_fullest_stage() -> None:
    metrics = RESULT.ranked[0].prediction.metrics.model_copy(
        update={
            "memory_bytes": (
                {"weights": 5, "activations": 1},
                {"weights": 2, "activations": 9},
            )
        }
    )
    assert largest_class(metrics) == "activations"


def test_a_result_survives_its_own_json() -> None:
    again = SearchResult.model_validate_json(RESULT.model_dump_json())
    assert again == RESULT
