"""A simulated step: classes sum to it, what is planted shows where it belongs, memory agrees."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.report.attribution import exposed_by_rank
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.engine.memory_timeline import RankMemory, memory_timelines
from flopwright.simulator.engine.perturb import Perturbation
from flopwright.simulator.engine.simulate import SimulatedStep, simulate
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.simulator.training.predict import durations_of, plan_costs, predict
from flopwright.simulator.training.program import program_of
from flopwright.simulator.training.replay import replay
from flopwright.simulator.training.trace import RankTimes
from flopwright.spec.load import load_scenario
from flopwright.spec.scenario import Scenario

DENSE = ParallelPlan(pp=4, tp=2, dp_shard=4, zero_stage=1)


@pytest.fixture(scope="module")
def k2() -> Scenario:
    """Kimi K2 with a small batch."""
    scenario = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    workload = scenario.workload.model_copy(update={"global_batch_size": 64})
    return scenario.model_copy(update={"workload": workload})


def shares_nics(scenario: Scenario, nics: int) -> Scenario:
    """Returns the scenario with so many adapters a node, under one oversubscribed spine."""
    node = scenario.cluster.node.model_copy(update={"nics": nics})
    return scenario.model_copy(
        update={"cluster": scenario.cluster.model_copy(update={"node": node})}
    )


def check_sums(step: SimulatedStep) -> None:
    """Exposed classes and idle sum to the step on every rank."""
    for exposed in exposed_by_rank(step.trace, step.step_time_s).values():
        assert sum(exposed.values()) == pytest.approx(step.step_time_s, rel=1e-9)
    assert sum(step.time_s.values()) == pytest.approx(step.step_time_s, rel=1e-9)


SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "recompute": "full"},
    {"schedule": "interleaved_1f1b", "vpp": 2},
    {"schedule": "interleaved_1f1b_overlap", "vpp": 2},
    {"schedule": "zb_h1"},
    {"schedule": "zb_v", "vpp": 2},
    {"schedule": "dualpipe_v", "vpp": 2},
]


@pytest.mark.parametrize("axes", SCHEDULES, ids=lambda a: "-".join(map(str, a.values())))
def test_all_engines_agree_and_classes_sum(k2: Scenario, axes: dict[str, Any]) -> None:
    plan = ParallelPlan(pp=4, ep=8, dp_shard=8, zero_stage=1, **axes)
    replayed = simulate(k2, plan, engine="replay")
    private = simulate(k2, plan, engine="events", contention=False)
    shared = simulate(k2, plan, engine="events")
    prediction, _ = predict(k2, plan)
    assert replayed.step_time_s == pytest.approx(prediction.metrics.step_time_s, abs=1e-9)
    assert private.step_time_s == pytest.approx(replayed.step_time_s, abs=1e-9)
    assert private.trace == replayed.trace
    # Contention stretches transfers; a list whose order is fixed can only get later.
    assert shared.step_time_s >= private.step_time_s - 1e-9
    for step in (replayed, shared):
        check_sums(step)


@pytest.mark.parametrize("engine", ["replay", "events"])
def test_a_straggler_shows_as_its_work_and_as_the_waiting_of_others(
    k2: Scenario, engine: Any
) -> None:
    plan = ParallelPlan(pp=4, ep=8, dp_shard=8, zero_stage=1)
    alike = simulate(k2, plan, engine=engine)
    slow = simulate(k2, plan, engine=engine, perturbation=Perturbation(stragglers={9: 2.0}))
    check_sums(slow)
    assert slow.critical_rank == 9
    work = ("forward", "backward")
    exposed = exposed_by_rank(slow.trace, slow.step_time_s)
    for other in (8, 10):
        for cls in work:
            assert exposed[9][cls] == pytest.approx(2 * exposed[other][cls], rel=1e-9)
        assert exposed[other]["idle"] > exposed[9]["idle"]
        assert exposed[other].get("ep_comm", 0) == pytest.approx(exposed[9]["ep_comm"], rel=1e-6)
    assert slow.step_time_s > 1.3 * alike.step_time_s


@pytest.mark.parametrize("axes", SCHEDULES[1:], ids=lambda a: "-".join(map(str, a.values())))
def test_a_straggler_computes_longer_and_sends_as_fast(k2: Scenario, axes: dict[str, Any]) -> None:
    """In pairs too, and in the optimizer step that gathers weights."""
    plan = ParallelPlan(pp=4, tp=2, ep=16, dp_shard=8, zero_stage=1, **axes)
    alike = simulate(k2, plan, engine="replay")
    slow = simulate(k2, plan, engine="replay", perturbation=Perturbation(stragglers={19: 2.0}))
    check_sums(slow)
    before, after = (_seconds_of(step, rank) for step, rank in ((alike, 1), (slow, 18)))
    assert {"forward", "backward", "optimizer", "tp_comm", "dp_comm"} <= set(before)
    for cls, seconds in before.items():
        factor = 2.0 if cls in {"forward", "backward", "recompute", "optimizer"} else 1.0
        assert after[cls] == pytest.approx(factor * seconds, rel=1e-9), cls


def _seconds_of(step: SimulatedStep, rank: int) -> dict[str, float]:
    """Returns what a rank does by class, whether something hides it or not."""
    out: dict[str, float] = {}
    for e in step.trace:
        if e.rank == rank:
            out[e.cls] = out.get(e.cls, 0.0) + e.end_s - e.start_s
    return out


def test_a_slow_link_slows_all_that_replicas_exchange(k2: Scenario) -> None:
    plan = ParallelPlan(pp=2, tp=4, ep=4, dp_shard=8, zero_stage=1)
    alike = simulate(k2, plan, engine="replay")
    slow = simulate(k2, plan, engine="replay", perturbation=Perturbation(slow_links={0: 3.0}))
    before, after = (_seconds_of(step, 0) for step in (alike, slow))
    norm = next(e.end_s - e.start_s for e in alike.trace if e.name == "NORM")
    for cls, seconds in before.items():
        much = 3 * (seconds - norm) + norm if cls == "dp_comm" else seconds
        assert after[cls] == pytest.approx(3 * seconds if cls == "ep_comm" else much, rel=1e-9), (
            cls
        )


def test_a_slow_link_shows_in_the_class_of_what_it_carries(k2: Scenario) -> None:
    plan = ParallelPlan(pp=4, dp_shard=4, zero_stage=1, tp=8)
    alike = simulate(k2, plan, perturbation=Perturbation(stragglers={0: 1.0}))
    before = exposed_by_rank(alike.trace, alike.step_time_s)
    slow = simulate(k2, plan, perturbation=Perturbation(slow_links={40: 300.0}))
    after = exposed_by_rank(slow.trace, slow.step_time_s)
    check_sums(slow)
    # Rank 40 leads the second replica of stage 1; it sends to 72 (stage 2) and 8 (stage 0).
    for receiver in (8, 72):
        assert after[receiver]["pp_comm"] > 10 * before[receiver].get("pp_comm", 0.0) > 0
    for rank, classes in after.items():
        for cls in ("forward", "backward", "tp_comm", "optimizer"):
            assert classes.get(cls, 0) == pytest.approx(before[rank].get(cls, 0), rel=1e-6)
    # Its ring reduces gradients: the whole group is as slow as its slowest member.
    for member in (32, 40, 48, 56):
        assert after[member]["dp_comm"] > 10 * before[member]["dp_comm"]


def test_contention_shows_in_communication_only(k2: Scenario) -> None:
    """Gradients and activations of one adapter slow each other; compute stays."""
    plan = ParallelPlan(pp=8, ep=16, dp_shard=16, zero_stage=1)
    private = simulate(k2, plan, contention=False)
    shared = simulate(k2, plan)
    before = exposed_by_rank(private.trace, private.step_time_s)
    after = exposed_by_rank(shared.trace, shared.step_time_s)
    assert shared.step_time_s > private.step_time_s
    grown = 0.0
    for rank, classes in after.items():
        for cls in ("forward", "backward", "optimizer"):
            assert classes[cls] == pytest.approx(before[rank][cls], rel=1e-9)
        comm = [c for c in classes if c.endswith("_comm")]
        grown += sum(classes[c] - before[rank].get(c, 0.0) for c in comm)
    assert grown > 0


def with_host_link(scenario: Scenario, bytes_per_s: float) -> Scenario:
    """Returns the scenario with another bandwidth to the host."""
    node = scenario.cluster.node
    assert node.host_link is not None
    link = node.host_link.model_copy(update={"bytes_per_s": bytes_per_s})
    node = node.model_copy(update={"host_link": link})
    cluster = scenario.cluster.model_copy(update={"node": node})
    return scenario.model_copy(update={"cluster": cluster})


def test_copies_to_the_host_hide_until_their_engine_cannot_keep_up(k2: Scenario) -> None:
    axes: dict[str, Any] = {"pp": 4, "ep": 8, "dp_shard": 8, "zero_stage": 1}
    plan = ParallelPlan(activation_offload=True, **axes)
    kept = simulate(k2, ParallelPlan(**axes))
    fast = simulate(with_host_link(k2, 1e15), plan)
    assert fast.step_time_s == pytest.approx(kept.step_time_s, rel=1e-3)
    slow_host = with_host_link(k2, 5e9)
    slow = simulate(slow_host, plan, contention=False)
    check_sums(slow)
    assert slow.step_time_s == pytest.approx(
        simulate(slow_host, plan, engine="replay").step_time_s, abs=1e-9
    )
    assert slow.step_time_s > 1.2 * kept.step_time_s
    exposed = exposed_by_rank(slow.trace, slow.step_time_s)
    before = exposed_by_rank(kept.trace, kept.step_time_s)
    for rank in range(3):  # the last stage holds one micro-batch: nothing leaves
        assert exposed[rank]["backward"] == pytest.approx(before[rank]["backward"], rel=1e-9)
        copies = [e for e in slow.trace if e.rank == rank and e.stream == "copy"]
        assert {e.name.split("(")[0] for e in copies} == {"OFFLOAD", "FETCH"}
    assert exposed[0]["offload"] > 0.1 * slow.step_time_s


@pytest.mark.parametrize("bytes_per_s", [2e9, 60e9])
@pytest.mark.parametrize(
    "axes",
    [
        {"schedule": "1f1b"},
        {"schedule": "gpipe", "recompute": "full"},
        {"schedule": "interleaved_1f1b", "vpp": 2},
    ],
    ids=lambda a: a["schedule"],
)
def test_what_is_copied_never_holds_more_places_than_the_memory_model_has(
    k2: Scenario, axes: dict[str, Any], bytes_per_s: float
) -> None:
    """However slow its link, a rank waits rather than pile up what has not left."""
    plan = ParallelPlan(pp=4, ep=8, dp_shard=8, zero_stage=1, activation_offload=True, **axes)
    host = with_host_link(k2, bytes_per_s)
    model = evaluate(host, Candidates.from_plans([plan]), default_calibration(k2.cluster.node.gpu))
    step = simulate(host, plan, engine="replay")
    for m in step.memory:
        most = model.memory_bytes["activations"][m.stage, 0]
        assert 0 < m.activations.max() <= most * (1 + 1e-9)
        assert abs(m.activations[-1]) < 1
    private = simulate(host, plan, contention=False)
    assert private.step_time_s == pytest.approx(step.step_time_s, abs=1e-9)


def test_the_seed_decides_the_jitter(k2: Scenario) -> None:
    one, same, other = (
        simulate(k2, DENSE, perturbation=Perturbation(jitter=0.1, seed=seed), samples=3)
        for seed in (1, 1, 2)
    )
    assert one.samples_s == same.samples_s
    assert one.trace == same.trace
    assert one.samples_s != other.samples_s
    assert len(set(one.samples_s)) == 3
    assert one.ranks == 16
    check_sums(one)


def test_jitter_makes_a_step_longer_the_more_replicas_wait(k2: Scenario) -> None:
    alike = simulate(k2, DENSE, engine="replay").step_time_s
    drawn = simulate(k2, DENSE, engine="replay", perturbation=Perturbation(jitter=0.2), samples=20)
    assert min(drawn.samples_s) > alike, "the latest of 16 ranks counts, the mean stays"


def plans(draw: st.DrawFn) -> ParallelPlan:
    axes = draw(st.sampled_from(SCHEDULES))
    ep = draw(st.sampled_from([4, 8]))
    return ParallelPlan(
        pp=draw(st.sampled_from([2, 4, 8])),
        ep=ep,
        tp=draw(st.sampled_from([1, 2])),
        dp_shard=draw(st.sampled_from([4, 8])) * ep // 4,
        zero_stage=draw(st.sampled_from([0, 1])),
        fp8_activations=draw(st.booleans()),
        **axes,
    )


def memory_of_plan(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration
) -> tuple[RankMemory, ...]:
    """Returns the memory through the replayed step."""
    costs = plan_costs(scenario, plan, calibration)
    program = program_of(plan, plan.num_microbatches(scenario.workload.global_batch_size))
    timeline = replay(program, durations_of(costs))
    times = RankTimes(start_s=timeline.start_s, end_s=timeline.end_s)
    return memory_timelines(scenario, plan, calibration, costs, program, times)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_peak_is_that_of_the_memory_model(k2: Scenario, data: st.DataObject) -> None:
    plan = plans(data.draw)
    if plan_violations(plan, k2):
        return
    calibration = default_calibration(k2.cluster.node.gpu)
    timelines = memory_of_plan(k2, plan, calibration)
    model = evaluate(k2, Candidates.from_plans([plan]), calibration)
    every = np.asarray(sum(model.memory_bytes.values()))[:, 0]
    for m in timelines:
        activations = model.memory_bytes["activations"][m.stage, 0]
        assert m.activations.max() == pytest.approx(activations, rel=1e-9)
        # The model sums a stage's peaks as if they met: never less, and no more than the
        # shorter-lived of the two above it.
        assert m.peak_bytes <= every[m.stage] + 2
        temporaries = model.memory_bytes["temporaries"][m.stage, 0]
        assert m.peak_bytes >= every[m.stage] - min(temporaries, activations) - 2
        assert abs(m.activations[-1]) < 1
        assert abs(m.temporaries[-1]) < 1
    # In 1F1B the first backward of a stage finds it at its fullest: the peaks do meet.
    first = timelines[0]
    if plan.schedule == "1f1b" and model.memory_bytes["temporaries"][0, 0] > 0:
        assert first.peak_bytes == pytest.approx(every[0], rel=0.2)


def test_what_cannot_be_simulated_is_refused(k2: Scenario) -> None:
    with pytest.raises(InputError, match="no such rank"):
        simulate(k2, DENSE, perturbation=Perturbation(stragglers={99: 2.0}))
    with pytest.raises(InputError, match="too many"):
        simulate(k2, DENSE, perturbation=Perturbation(jitter=0.1), samples=10_000)
    with pytest.raises(InputError, match="factor"):
        Perturbation(slow_links={0: 0.0})
    with pytest.raises(InputError, match="jitter"):
        Perturbation(jitter=-1.0)
    with pytest.raises(InputError, match="must divide"):
        simulate(k2, ParallelPlan(tp=7))
