"""The search for a loop: closed-form optima, brute force, goals, and what it keeps of the rest."""

from __future__ import annotations

import pytest

from flopwright.errors import InputError
from flopwright.plan.loop import load_loop_plan, loop_plan_violations
from flopwright.planner.rollouts.best_first import Reached, front_of
from flopwright.planner.rollouts.choices import choices, own_shape
from flopwright.planner.rollouts.search import search_loop
from flopwright.simulator.rollouts.closed_forms import optimal_stop_fraction_exponential
from flopwright.simulator.rollouts.rounds import simulate
from flopwright.spec.load import dump_yaml
from flopwright.spec.loop import LoopScenario, loop_of, loop_scenario_from_text
from flopwright.spec.rollout import RolloutScenario, with_stop_fraction


def _round(**changes):
    plain = {
        "name": "t",
        "prompts": 24,
        "samples_per_prompt": 2,
        "lengths": {"kind": "exponential", "mean": 200},
        "decode": {"per_step": "10 ms", "per_attempt": "50 us"},
        "update": {"fixed": "1 s"},
        "rounds": 10,
    }
    return plain | changes


def _loop(rollout, **changes):
    return LoopScenario.model_validate({"name": "t", "rollout": rollout} | changes)


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "best"), [(0.1, 0.341), (0.6, 0.604), (2.0, 0.778)])
def test_best_lambda_of_exponential_lengths(ratio, best):
    # lambda / (1 - lambda) + ln(1 - lambda) = u0 / (a mu): rollouts without slots, fluid
    rollout = RolloutScenario.model_validate(
        _round(
            prompts=500,
            samples_per_prompt=1,
            decode={"per_step": "10 ms", "per_attempt": "2 us"},
            update={"fixed": f"{ratio * 0.01 * 200} s", "per_token": "1 us"},
            rounds=15,
        )
    )
    assert optimal_stop_fraction_exponential(ratio * 2.0, 2.0) == pytest.approx(best, abs=6e-4)
    fractions = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    space = loop_of(rollout).search.model_copy(update={"stop_fraction": fractions})
    found = search_loop(loop_of(rollout).model_copy(update={"search": space}))
    chosen = found.best
    assert chosen.plan.generation.stop_fraction == pytest.approx(best, abs=0.06)
    at_best = simulate(with_stop_fraction(rollout, best)).attempts_per_s
    assert chosen.outcome.attempts_per_s == pytest.approx(at_best, rel=0.01)


@pytest.mark.parametrize(("r", "t"), [(300.0, 100.0), (100.0, 100.0), (60.0, 180.0)])
def test_best_split_of_a_loop_without_tail_or_sync(r, t):
    # f* = t / (r + t), throughput G r t / (r + t) = that of the co-located loop
    gpus, tokens = 16, 50
    rollout = _round(
        prompts=480,
        samples_per_prompt=1,
        lengths={"kind": "deterministic", "tokens": tokens},
        decode={"per_attempt": f"{1 / r} s"},
        update="0 s",
        instances=gpus,
        rounds=2,
    )
    loop = _loop(
        rollout,
        gpus=gpus,
        train={"gpu_s_per_token": 1 / t},
        search={
            "layout": ["one_step_off"],
            "generation_share": [k / gpus for k in range(1, gpus)],
            "lambda": [1],
        },
    )
    split = search_loop(loop, zoom=False).best
    ideal = gpus * r * t / (r + t) / tokens
    assert split.plan.generation.gpus / gpus == pytest.approx(t / (r + t))
    assert split.outcome.attempts_per_s == pytest.approx(ideal, rel=1e-6)
    assert split.outcome.mean_staleness == 1
    both = loop.search.model_copy(update={"layout": ("one_step_off", "colocated")})
    found = search_loop(loop.model_copy(update={"search": both}), zoom=False)
    # As fast and fresher: no split can be better, and none has to be simulated to know it.
    assert found.best.plan.layout == "colocated"
    assert found.best.outcome.attempts_per_s == pytest.approx(ideal, rel=1e-6)
    assert found.simulated == 1


GRID = {
    "layout": ["colocated", "disaggregated", "one_step_off"],
    "generation_share": [0.25, 0.5, 0.75],
    "lambda": [0.5, 0.8, 1],
    "slots": [3, 0],
}


@pytest.mark.slow
def test_search_equals_simulating_every_choice():
    seed = 0
    loop = _loop(
        _round(
            lengths={"kind": "lognormal", "mean": 120, "sigma": 0.8, "cap": 1000},
            instances=4,
            kv={"per_token": "1 KiB", "capacity": "1 GiB"},
            rounds=3,
            goals={"max_mean_staleness": 1.2},
        ),
        gpus=4,
        train={"gpu_s_per_token": 0.0002, "fixed": "2 s"},
        search=GRID | {"throttle": [False]},
    )
    grid = choices(loop, (own_shape(loop),))
    assert len(grid) == 7 * 3 * 2
    found = search_loop(loop, seed=seed, zoom=False, top_k=100)
    reached = {}
    for i, choice in enumerate(grid):
        single = search_loop(_only(loop, choice), seed=seed, zoom=False)
        if single.best is not None:
            out = single.best.outcome
            reached[i] = Reached(out.attempts_per_s, out.mean_staleness)
    best = max(reached.values(), key=lambda r: r.value)
    assert found.best.outcome.attempts_per_s == pytest.approx(best.value, rel=1e-12)
    corners = [(reached[i].level, reached[i].value) for i in front_of(reached)]
    front = [(r.outcome.mean_staleness, r.outcome.attempts_per_s) for r in found.front]
    assert [x for x, _ in front] == pytest.approx([x for x, _ in corners])
    assert [y for _, y in front] == pytest.approx([y for _, y in corners])
    assert found.complete
    assert found.ruled_out > 0
    assert found.simulated + found.ruled_out <= len(grid)


def _only(loop, choice):
    return loop.model_copy(
        update={
            "search": loop.search.model_copy(
                update={
                    "layout": (choice.layout,),
                    "generation_share": (choice.generation_gpus / 4,)
                    if choice.layout != "colocated"
                    else (0.5,),
                    "stop_fraction": (choice.stop_fraction,),
                    "slots": (choice.slots,),
                }
            )
        }
    )


def test_what_breaks_the_goal_is_kept_with_its_fix():
    loop = _loop(
        _round(goals={"max_mean_staleness": 0.3}),
        search={"layout": ["colocated"], "lambda": [0.5, 0.9]},
    )
    found = search_loop(loop, rounds=3, zoom=False)
    assert found.best.plan.generation.stop_fraction == 0.9
    (stale,) = found.infeasible
    (broken,) = stale.violations
    assert broken.field == "goals.max_mean_staleness"
    assert broken.limit == "0.3"
    assert "0.769" in broken.nearest_fix


@pytest.mark.slow
def test_attempts_that_wait_for_a_place_are_fresher_and_not_refused_before():
    # Little's law counts attempts in flight; one without a token is no version behind.
    loop = _loop(
        _round(slots_per_instance=4, goals={"max_mean_staleness": 0.5}),
        search={"layout": ["colocated"], "lambda": [0.5], "slots": [4, 0]},
    )
    found = search_loop(loop, rounds=4, zoom=False)
    assert found.best.plan.generation.slots_per_instance == 4
    assert found.best.outcome.mean_staleness < 0.5
    (refused,) = found.infeasible
    assert "slots all" in refused.words


def test_time_that_ends_is_told():
    loop = _loop(_round(), search={"layout": ["colocated"], "lambda": [0.5, 0.7, 0.9, 1]})
    found = search_loop(loop, rounds=2, time_limit_s=0.0)
    assert found.simulated == 1
    assert found.left > 0
    assert not found.complete


def test_gpus_that_no_instance_divides_are_refused():
    with pytest.raises(InputError, match="instances must divide"):
        search_loop(_loop(_round(gpus_per_instance=3), gpus=4, search={"layout": ["colocated"]}))


CLUSTER_LOOP = """
name: tight
cluster: 64_h100
gpus: 16
hosts: {reserved: 64 GiB, nvme: 1 TiB}
train: {gpu_s_per_token: 0.001, state: 1200 GiB}
search: {layout: [colocated], lambda: [1], states: [dram, nvme], host_pool: [0 GiB, 1500 GiB]}
rollout:
  name: tight
  prompts: 16
  lengths: {kind: deterministic, tokens: 20}
  decode: {per_step: 1 ms}
  instances: 16
"""


def test_memory_that_does_not_suffice_is_told_by_place():
    loop = loop_scenario_from_text(CLUSTER_LOOP)
    found = search_loop(loop, rounds=1, zoom=False)
    assert found.best.plan.hand_over.states == "dram"
    by_field = {v.field: v for loop in found.infeasible for v in loop.violations}
    dram = by_field["memory.dram.generation"]
    assert "GiB" in dram.limit
    assert "host pool" in dram.nearest_fix
    for ranked in found.ranked:
        assert loop_plan_violations(ranked.plan) == []
        assert {b.place for b in ranked.plan.memory} >= {"hbm", "dram"}


def test_a_plan_is_a_file_that_loads_and_a_changed_one_is_refused(tmp_path):
    loop = loop_scenario_from_text(CLUSTER_LOOP)
    plan = search_loop(loop, rounds=1, zoom=False).best.plan
    file = tmp_path / "plan.yaml"
    text = dump_yaml(plan)
    file.write_text(text)
    assert load_loop_plan(file) == plan
    file.write_text(text.replace("states: dram", "states: nvme", 1))
    with pytest.raises(InputError, match="plan_hash"):
        load_loop_plan(file)
    file.write_text(text.replace("schema_version: 1", "schema_version: 2", 1))
    with pytest.raises(InputError, match="newer"):
        load_loop_plan(file)
    file.write_text(text + "extra: 1\n")
    with pytest.raises(InputError, match="extra"):
        load_loop_plan(file)
