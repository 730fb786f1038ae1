"""The time of a plan's step is that of its full batch, not of the smaller ones before it."""

from __future__ import annotations

from flopwright.executor.measure.timers import StepTrace
from flopwright.executor.train.collect import StepRow
from flopwright.executor.train.results import step_times
from flopwright.executor.train.rounds import History, remember


def turn(first: int, sequences: list[int], full: int = 8) -> list[StepRow]:
    return [
        StepRow(
            step=first + i,
            loss=1.0,
            gradient_norm=1.0,
            learning_rate=0.1,
            step_time_s=float(n),
            timed=True,
            traces=(StepTrace(0.0, float(n), ()),),
            sequences=n,
            full_batch=n == full,
        )
        for i, n in enumerate(sequences)
    ]


def test_steps_of_smaller_batches_are_not_the_plans() -> None:
    history = History()
    for first, sequences in ((0, [2, 2]), (2, [4, 4]), (4, [4, 8]), (6, [8, 8]), (8, [8, 8])):
        remember(history, turn(first, sequences))
    times = step_times(history)
    assert times.step_time_s == 8.0
    assert history.sequences == 8
    assert times.discarded_steps == 6  # five of the ramp, and the first round behind it
    assert {trace.duration_s for step in history.traces for trace in step} == {8.0}


def test_a_run_that_ends_in_its_ramp_has_the_time_of_its_last_batch() -> None:
    history = History()
    remember(history, turn(0, [2, 2]))
    remember(history, turn(2, [2, 4]))
    times = step_times(history)
    assert times.step_time_s == 4.0
    assert history.sequences == 4
    assert len(history.losses) == 4
