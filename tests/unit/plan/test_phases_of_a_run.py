"""A run's phases as scenarios, and the learning rate through ramps and linear decays."""

import pytest

from flopwright.errors import InputError
from flopwright.plan.learning_rate import learning_rate_at
from flopwright.plan.phases import phase_of, phases_of
from flopwright.spec.load import load_model, load_scenario
from flopwright.spec.model import YarnScaling
from flopwright.spec.phases import BatchRamp, LearningRate, TrainingPhase
from flopwright.spec.scenario import Scenario

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
LINEAR = LearningRate(kind="linear", peak=2e-5, final=7e-6, warmup_steps=0)


def _with(scenario: Scenario, **workload: object) -> Scenario:
    return scenario.model_copy(
        update={"workload": scenario.workload.model_copy(update=dict(workload))}
    )


def test_a_run_of_one_phase_is_its_scenario() -> None:
    (only,) = phases_of(K2)
    assert only.scenario == K2
    assert only.name == "pretrain"


def test_each_phase_has_its_positions_in_its_model() -> None:
    yarn = YarnScaling(factor=40, original_max_seq_len=4096)
    long = TrainingPhase(
        name="long", total_tokens=10**11, learning_rate=LINEAR, seq_len=32768, rope_scaling=yarn
    )
    run = _with(K2, rope_scaling="none", later_phases=(long,))
    first, second = phases_of(run)
    ropes = [p.scenario.model.attention.rope for p in (first, second)]
    assert [r and r.scaling for r in ropes] == [None, yarn]
    assert first.scenario.workload.rope_scaling is None
    assert not first.scenario.workload.later_phases
    assert second.scenario.name == f"{K2.name}_long"
    assert phase_of(run, "long") == second
    with pytest.raises(InputError, match="did you mean 'long'"):
        phase_of(run, "lung")
    gpt3 = run.model_copy(update={"model": load_model("gpt3_175b")})
    with pytest.raises(InputError, match="no rotary positions"):
        phases_of(gpt3)


def test_a_linear_decay_is_a_straight_line() -> None:
    w = _with(K2, total_tokens=100 * 2**26, learning_rate=LINEAR).workload
    assert w.num_steps == 100
    rates = [learning_rate_at(step, w) for step in range(100)]
    assert rates[0] == 2e-5
    for step, rate in enumerate(rates):
        assert rate == pytest.approx(2e-5 - 1.3e-5 * step / 100)


def test_a_ramp_holds_the_peak_to_the_same_token() -> None:
    """With smaller batches first, the decay starts after more steps, at the same tokens."""
    ramp = BatchRamp(start=8192, increment=4096, tokens=2**40)
    plain, ramped = K2.workload, _with(K2, batch_ramp=ramp).workload
    hold = plain.learning_rate.hold_until_tokens
    assert hold is not None
    for w in (plain, ramped):
        start = w.steps_within(hold)
        assert learning_rate_at(start - 1, w) == 2e-4
        assert learning_rate_at(start, w) == 2e-4  # the cosine's first point
        assert learning_rate_at(start + 1, w) < 2e-4
        assert learning_rate_at(w.num_steps - 1, w) == pytest.approx(2e-5, rel=1e-3)
    assert ramped.steps_within(hold) > plain.steps_within(hold)
