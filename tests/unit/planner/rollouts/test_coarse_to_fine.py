"""The search of grids that are too large to be simulated whole, against simulating them whole."""

from __future__ import annotations

import pytest

from flopwright.cli._loop import search_data
from flopwright.errors import InputError
from flopwright.planner.rollouts import descent
from flopwright.planner.rollouts.bounds import work_of
from flopwright.planner.rollouts.choices import Axes, choices, own_shape
from flopwright.planner.rollouts.descent import most_of
from flopwright.planner.rollouts.engines import served
from flopwright.planner.rollouts.known import Known
from flopwright.planner.rollouts.search import search_loop
from flopwright.planner.rollouts.simulated import Simulations
from flopwright.planner.rollouts.text import search_lines
from flopwright.spec.loop import LoopScenario, loop_scenario_from_text
from flopwright.spec.loop_parts import Training
from flopwright.spec.rollouts.engine_served import EngineShape

SPACE = {
    "layout": ["colocated", "disaggregated", "one_step_off", "async"],
    "generation_share": [0.5, 0.75],
    "lambda": [0.5, 0.8, 1],
    "staleness_bound": [1, 2],
    "slots": [0, 4],
    "throttle": [False, True],
    "elastic": [False, True],
}


def _loop(seconds: float, mean: int) -> LoopScenario:
    rollout = {
        "name": "t",
        "prompts": 16,
        "samples_per_prompt": 2,
        "lengths": {"kind": "lognormal", "mean": mean, "sigma": 0.8, "cap": 1000},
        "decode": {"per_step": "10 ms", "per_attempt": "200 us"},
        "instances": 4,
        "kv": {"per_token": "1 KiB", "capacity": "2 MiB"},
        "prefill": {"per_token": 1e-4},
        "rounds": 2,
        "goals": {"max_mean_staleness": 2},
    }
    train = {"gpu_s_per_token": seconds, "fixed": "1 s"}
    data = {"name": "t", "rollout": rollout, "gpus": 4, "train": train, "search": SPACE}
    return LoopScenario.model_validate(data)


@pytest.mark.slow
def test_it_finds_what_simulating_everything_finds_to_a_few_percent():
    loop = _loop(0.0003, 120)
    whole = search_loop(loop, zoom=False, whole_up_to=10_000)
    fast = search_loop(loop, zoom=False, whole_up_to=0)
    assert whole.complete
    assert whole.coverage is None
    assert fast.best.outcome.attempts_per_s >= 0.97 * whole.best.outcome.attempts_per_s
    assert fast.simulated < 0.6 * whole.simulated
    # What was not simulated is no faster than the bound that is told says.
    assert whole.best.outcome.attempts_per_s <= fast.best.outcome.attempts_per_s * (
        1 + fast.coverage.gap + 1e-9
    )
    assert fast.candidates == len(choices(loop, (own_shape(loop),)))
    for corner in whole.front:  # most of the height of the front, point by point
        level = corner.outcome.mean_staleness * 1.05 + 1e-9
        near = [r.outcome.attempts_per_s for r in fast.front if r.outcome.mean_staleness <= level]
        assert max(near, default=0.0) >= 0.85 * corner.outcome.attempts_per_s


def test_the_report_says_what_was_covered():
    found = search_loop(_loop(0.001, 60), rounds=1, zoom=False, whole_up_to=0)
    text = "\n".join(search_lines(found))
    assert "from coarse to fine" in text
    assert "no neighbour of the best is better" in text
    assert found.coverage.settled
    assert found.ended_early == ()
    assert "ENDED EARLY" not in text
    assert "of what was simulated, nothing is both faster" in text


def test_time_that_ends_is_told_here_too():
    found = search_loop(_loop(0.001, 60), rounds=1, whole_up_to=0, time_limit_s=0.0)
    assert not found.coverage.settled
    assert found.coverage.timed_out
    text = "\n".join(search_lines(found))
    assert "ENDED EARLY: not every neighbour of the best was looked at: the time was up" in text
    assert "(--time-limit gives it more)" in text
    assert found.best is not None


def test_a_search_that_made_all_its_moves_does_not_blame_the_time(monkeypatch):
    monkeypatch.setattr(descent, "_MOVES", 0)
    found = search_loop(_loop(0.001, 60), rounds=1, whole_up_to=0, zoom=False)
    assert not found.coverage.settled
    assert not found.coverage.timed_out
    assert found.ended_early == (
        "not every neighbour of the best was looked at: it had made its moves",
    )
    assert search_data(found)["ended_early"] == list(found.ended_early)


def test_neighbours_differ_in_one_axis_and_cover_every_axis():
    loop = _loop(0.001, 60)
    axes = Axes(loop, (own_shape(loop),))
    every = set(choices(loop, axes.shapes))
    names = ("layout", "generation_gpus", "slots", "stop_fraction", "staleness_bound")
    names += ("throttled", "elastic")
    seen = set()
    for choice in every:
        for other in axes.neighbours(choice):
            assert other in every
            differ = {n for n in names if getattr(choice, n) != getattr(other, n)}
            assert differ
            if "layout" not in differ:
                assert len(differ - {"elastic"}) <= 1
            seen |= differ
    assert seen == set(names)


def test_a_structure_is_bounded_where_states_leave_the_gpus():
    # With the states in GPU memory no cache fits: the bound must not be that of no round at all.
    text = """
name: tight
cluster: 64_h100
gpus: 16
serve: {model: llama31_8b}
train: {gpu_s_per_token: 0.001, state: 1000 GiB}
hosts: {reserved: 64 GiB}
search: {layout: [colocated], tp: [1]}
rollout:
  name: tight
  prompts: 64
  lengths: {kind: lognormal, mean: 500, sigma: 0.5, cap: 4000}
"""
    loop = loop_scenario_from_text(text)
    known = Known(
        loop=loop, rounds=1, sims=Simulations(0), started_s=0.0, time_limit_s=None,
        progress=None, work=work_of(loop.rollout),
    )  # fmt: skip
    axes = known.axes()
    structures = list(axes.structures())
    assert structures
    for one in structures:
        assert known.rough(one).violations  # states in hbm, the first place
        assert most_of(known, axes, one) > 0


def test_layouts_left_out_are_all_where_an_update_can_be_priced_on_fewer_gpus():
    bare = loop_scenario_from_text(
        "name: bare\ncluster: 64_h100\ngpus: 16\nserve: {model: llama31_8b, software: sglang}\n"
        "rollout: {name: r, prompts: 64, lengths: {kind: exponential, mean: 500}}\n"
    )
    assert Axes(bare, ()).layouts == ("colocated",)
    trained = bare.model_copy(update={"train": Training(gpu_s_per_token=0.001)})
    assert set(Axes(trained, ()).layouts) == {
        "colocated",
        "disaggregated",
        "one_step_off",
        "async",
    }
    assert bare.serve is not None
    assert served(bare, bare.serve, EngineShape(tp=8)).model_bytes > 0


def test_an_engine_that_is_not_there_is_refused_by_name():
    loop = loop_scenario_from_text(
        "name: bare\ncluster: 64_h100\ngpus: 16\nserve: {model: llama31_8b, software: vlm}\n"
        "rollout: {name: r, prompts: 64, lengths: {kind: exponential, mean: 500}}\n"
    )
    with pytest.raises(InputError, match=r"no such engine.*vllm"):
        served(loop, loop.serve, EngineShape(tp=8))
