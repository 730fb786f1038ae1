"""Who is in a tournament's field, and that no plan is judged by its own run."""

from __future__ import annotations

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.planner import tournament
from flopwright.planner.search import search
from flopwright.planner.space import legal_candidates
from flopwright.planner.tournament import (
    Field,
    choice,
    draw_random,
    enter_best,
    learn,
    new_field,
    priced,
    prior_choice,
)
from flopwright.report.metrics import Fingerprint, Measurement
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_scenario, make_plan_file

SCENARIO = load_scenario("llama_mini_2cpu_fp32")
WHERE = Fingerprint(
    machine="m", processor="p", num_cores=2, world_size=2, threads_per_rank=1,
    memory_bytes=2**33, python="3", tool_version="0",
)  # fmt: skip


def no_refusal(plan: ParallelPlan) -> str:
    return ""


def names(field: Field) -> list[str]:
    return [c.name for c in field.contenders]


def test_random_plans_are_legal_distinct_and_follow_the_seed() -> None:
    fields = []
    for seed in (0, 0, 1):
        field = new_field(SCENARIO, no_refusal)
        draw_random(field, 8, seed)
        fields.append(field)
    assert names(fields[0]) == names(fields[1])
    assert names(fields[0]) != names(fields[2])
    every = legal_candidates(SCENARIO)
    plans = [every.plan(i) for i in range(len(every))]
    assert len(set(names(fields[0]))) == 8
    for contender in fields[0].contenders:
        assert contender.plan in plans
        assert contender.origins == ("random",)
        expected, _ = predict(SCENARIO, contender.plan)
        assert contender.prior_step_s == expected.metrics.step_time_s


@pytest.mark.slow
def test_each_legal_plan_is_drawn_about_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tournament, "step_seconds", lambda *_: 1.0)  # not what is tested here
    drawn: dict[str, int] = {}
    for seed in range(120):
        field = new_field(SCENARIO, no_refusal)
        draw_random(field, 4, seed)
        for contender in field.contenders:
            key = str(contender.plan)
            drawn[key] = drawn.get(key, 0) + 1
    total, kinds = sum(drawn.values()), len(legal_candidates(SCENARIO))
    assert total == 480
    assert len(drawn) > 0.9 * kinds
    assert max(drawn.values()) < 4 * total / kinds


@pytest.mark.slow
def test_refused_plans_are_left_out_once_with_the_reason() -> None:
    def refusal(plan: ParallelPlan) -> str:
        return "no pipelines today" if plan.pp > 1 else ""

    field = new_field(SCENARIO, refusal)
    draw_random(field, 30, 0)
    draw_random(field, 30, 0)
    assert all(c.plan.pp == 1 for c in field.contenders)
    assert field.refused
    assert {r.reason for r in field.refused} == {"no pipelines today"}
    assert len({r.name for r in field.refused}) == len(field.refused)


@pytest.mark.slow
def test_the_best_of_a_search_enter_in_its_order_without_refused_ones() -> None:
    ranked = [r.plan for r in search(SCENARIO, None, 8).ranked]
    field = new_field(SCENARIO, lambda plan: "no" if plan == ranked[1] else "")
    enter_best(field, field.prior, 3)
    assert [c.plan for c in field.contenders] == [ranked[0], ranked[2], ranked[3]]
    enter_best(field, field.prior, 1, "prior")
    assert field.contenders[0].origins == ("top", "prior")
    assert len(field.contenders) == 3


def measured(plan: ParallelPlan, name: str, factor: float) -> Measurement:
    prediction, _ = predict(SCENARIO, plan, name=name)
    metrics = prediction.metrics.model_copy(
        update={
            "step_time_s": prediction.metrics.step_time_s * factor,
            "time_s": {c: factor * s for c, s in prediction.metrics.time_s.items()},
        }
    )
    seconds = metrics.step_time_s
    return Measurement(
        id=name, created="2026-01-01T00:00:00+00:00", plan_name=name,
        plan=make_plan_file(SCENARIO, plan, name).to_data(), metrics=metrics,
        step_time_p10_s=seconds, step_time_p90_s=seconds, step_time_samples_s=(seconds,),
        discarded_steps=0, fingerprint=WHERE,
    )  # fmt: skip


@pytest.mark.slow
def test_no_plan_is_priced_by_a_calibration_that_saw_it_run() -> None:
    field = new_field(SCENARIO, no_refusal)
    draw_random(field, 3, 0)
    a, b, c = field.contenders
    runs = [measured(x.plan, x.name, f) for x, f in ((a, 1.5), (b, 1.5), (c, 6.0))]
    learnt = learn(field.prior, runs)
    for contender in field.contenders:
        own = [m.id for m in runs if m.plan_name == contender.name]
        assert not set(own) & set(learnt.held_out(contender.name).measurements)
    assert set(learnt.calibration.measurements) == {m.id for m in runs}
    found = {x.name: x for x in priced(field.contenders, SCENARIO, learnt)}
    others = learn(field.prior, [m for m in runs if m.plan_name != c.name]).calibration
    expected, _ = predict(SCENARIO, c.plan, others)
    assert found[c.name].predicted_step_s == pytest.approx(expected.metrics.step_time_s)
    # The odd run of c, four times as slow, does not reach its own price.
    ratio = (found[c.name].predicted_step_s or 0) / c.prior_step_s
    assert 1.2 < ratio < 2.0


def test_what_was_not_run_is_priced_with_all_that_was_learnt() -> None:
    field = new_field(SCENARIO, no_refusal)
    draw_random(field, 2, 0)
    runs = [measured(x.plan, x.name, 2.0) for x in field.contenders]
    learnt = learn(field.prior, runs)
    enter_best(field, learnt.calibration, 2)
    contenders = priced(field.contenders, SCENARIO, learnt)
    fresh = [x for x in contenders if "top" in x.origins and "random" not in x.origins]
    for contender in fresh:
        expected, _ = predict(SCENARIO, contender.plan, learnt.calibration)
        assert contender.predicted_step_s == pytest.approx(expected.metrics.step_time_s)
    assert choice(contenders).predicted_step_s == min(x.predicted_step_s or 0 for x in contenders)


def test_the_uncalibrated_choice_is_the_priors_best() -> None:
    field = new_field(SCENARIO, no_refusal)
    draw_random(field, 5, 2)
    enter_best(field, field.prior, 1, "prior")
    (best,) = (x for x in field.contenders if "prior" in x.origins)
    assert prior_choice(field.contenders) == best
    assert best.plan == search(SCENARIO, None, 1).ranked[0].plan


def test_without_runs_nothing_is_learnt() -> None:
    base = Calibration(id="base", created="", source="t")
    assert learn(base, []) == tournament.Learnt(calibration=base, without={})
