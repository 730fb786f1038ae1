"""Batch ramps and later phases: against a loop over steps, and what a file may say."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.spec.load import load_scenario
from flopwright.spec.phases import BatchRamp, LearningRate, TrainingPhase, batch_levels
from flopwright.spec.validate import validate
from flopwright.spec.workload import Workload
from flopwright.spec.yaml_lines import Document

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16").workload
LINEAR = {"kind": "linear", "peak": 2e-5, "final": 7e-6, "warmup_steps": 0}
PHASE = {"name": "long", "total_tokens": "60B", "learning_rate": LINEAR}


def _workload(**changes: Any) -> Workload:
    return Workload.model_validate(K2.to_data() | changes)


def _by_hand(seq_len: int, full: int, total: int, ramp: BatchRamp) -> list[int]:
    """The batch of each step as Megatron-LM's num_microbatches_calculator sets it."""
    increments = (full - ramp.start) // ramp.increment
    batches, consumed = [], 0
    while consumed < total:
        batch = full
        # consumed // (tokens an increment), in whole numbers
        past = consumed * increments // ramp.tokens if ramp.tokens else increments
        if past < increments:
            batch = ramp.start + past * ramp.increment
        batches.append(batch)
        consumed += batch * seq_len
    return batches


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 400)
)
def test_levels_are_the_steps_counted_one_by_one(
    seq_len: int, start: int, increment: int, increments: int, tokens: int
) -> None:
    full = start + increments * increment
    ramp = BatchRamp(start=start, increment=increment, tokens=tokens)
    total = tokens + 3 * full * seq_len
    steps = _by_hand(seq_len, full, total, ramp)
    levels = batch_levels(seq_len, full, total, ramp)
    assert [lv.batch for lv in levels for _ in range(lv.steps)] == steps
    for level in levels:
        assert level.first_token == seq_len * sum(steps[: level.first_step])
    workload = Workload.model_construct(
        seq_len=seq_len, global_batch_size=full, total_tokens=total, batch_ramp=ramp
    )
    assert workload.num_steps == len(steps)
    for asked in (0, tokens // 2, tokens, total):
        within = sum(seq_len * sum(steps[: i + 1]) <= asked for i in range(len(steps)))
        assert workload.steps_within(asked) == within


def test_without_a_ramp_the_step_is_the_whole_batch() -> None:
    (level,) = K2.batch_levels
    assert (level.batch, level.steps) == (16_384, 230_968)
    assert K2.num_steps == 230_968
    assert K2.num_full_steps == math.floor(15.5e12 / 2**26)


def test_what_a_workload_of_old_says_is_hashed_as_before() -> None:
    """New fields at their defaults are neither written nor hashed."""
    data = K2.to_data()
    assert not {"batch_ramp", "mixture", "rope_scaling", "later_phases"} & set(data)
    assert K2.content_hash() == Workload.model_validate(data).content_hash()
    assert _workload(mixture="web").content_hash() != K2.content_hash()


def test_a_phase_is_the_workload_with_what_it_says() -> None:
    w = _workload(
        mixture="main",
        later_phases=[
            PHASE | {"seq_len": 32768, "global_batch_size": 2048, "rope_scaling": "none"},
            PHASE | {"name": "more", "mixture": "anneal"},
        ],
    )
    long, more = (w.of_phase(p) for p in w.later_phases)
    assert (long.seq_len, long.global_batch_size, long.num_steps) == (32_768, 2048, 895)
    assert (long.mixture, more.mixture) == ("main", "anneal")
    assert (long.rope_scaling, more.rope_scaling) == ("none", None)
    assert more.seq_len == 4096
    assert long.optimizer == w.optimizer
    assert not long.later_phases
    assert not w.alone().later_phases
    assert Workload.model_validate(w.to_data()) == w


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_ramp": {"start": 3072, "increment": 1000, "tokens": "1B"}}, "by steps of 1000"),
        ({"batch_ramp": {"start": 16384, "increment": 1, "tokens": "1B"}}, "must reach"),
        ({"batch_ramp": {"start": 1, "increment": 1, "tokens": "1B"}}, "more than 256 batches"),
        ({"batch_ramp": {"start": 8192, "increment": 8192, "tokens": "16T"}}, "must not exceed"),
        ({"later_phases": [PHASE, PHASE]}, "two phases are named 'long'"),
        ({"later_phases": [PHASE | {"name": "pretrain"}]}, "the workload's own"),
        ({"later_phases": [PHASE | {"total_tokens": "1M"}]}, "phase 'long': total_tokens"),
        ({"later_phases": [PHASE | {"learning_rate": {"warmup_steps": 9999}}]}, "never reach"),
        ({"later_phases": [PHASE | {"name": "Long Run"}]}, "pattern"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _workload(**changes)


def test_every_broken_rule_is_told_at_once() -> None:
    ramp = {"start": 16384, "increment": 1, "tokens": "16T"}
    held = LINEAR | {"kind": "wsd", "hold_until_tokens": "20T"}
    late = PHASE | {"total_tokens": "1M", "learning_rate": held}
    changes = {"batch_ramp": ramp, "learning_rate": held}
    data = K2.to_data() | changes | {"later_phases": [late, late]}
    with pytest.raises(InputError) as refused:
        validate(Workload, Document(data, {}, "w.yaml"))
    rules = [v.rule for v in refused.value.violations]
    words = (
        "batch_ramp must reach",
        "batch_ramp.tokens",
        "learning_rate.hold_until_tokens",
        "two phases are named 'long'",
        "phase 'long': total_tokens (1000000) must hold",
        "phase 'long': learning_rate.hold_until_tokens",
    )
    assert all(any(rule.startswith(word) for rule in rules) for word in words), rules


def test_a_phase_has_a_rate_and_a_ramp_of_its_own() -> None:
    ramp = BatchRamp(start=8192, increment=8192, tokens=10**10)
    phase = TrainingPhase(
        name="p",
        total_tokens=10**11,
        learning_rate=LearningRate(kind="constant", warmup_steps=0),
        batch_ramp=ramp,
    )
    w = K2.model_copy(update={"later_phases": (phase,)})
    assert w.of_phase(phase).batch_ramp == ramp
    assert w.of_phase(phase.model_copy(update={"batch_ramp": None})).batch_ramp is None
