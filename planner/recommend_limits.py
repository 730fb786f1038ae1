"""The longest context, the largest micro-batch and the largest model that memory holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from flopwright.errors import divisors
from flopwright.planner.recommend_answer import (
    Attempt,
    Means,
    Question,
    Recommendation,
    assumptions_of,
    bound_by,
    planned,
)
from flopwright.planner.recommend_room import Room, room
from flopwright.planner.recommend_scale import MAX_SCALED_LAYERS, scaled
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import num_active_params, num_params
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Workload
from flopwright.units import plural, show_bytes, show_count

MAX_CONTEXT: Final = 2**26
# Contexts are told apart by so many tokens at most, and by a quarter of the scenario's own.
_CONTEXT_STEP: Final = 1024
# So many of the shortest are all told apart, beyond them half as many in each doubling.
FINE_RUNGS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ladder:
    """The values of a question, the smallest first: rung 1 to `last`.

    Attributes:
        own: rung of the scenario itself.
        at: rung -> the scenario with that value; value: the value; text: it in words.
    """

    question: Question
    own: int
    last: int
    at: Callable[[int], Scenario]
    value: Callable[[int], float]
    text: Callable[[int], str]
    assumptions: tuple[str, ...]


def longest_context(scenario: Scenario, means: Means) -> Recommendation:
    """Returns the longest context that fits, at no more tokens a step than the scenario's."""
    seq = scenario.workload.seq_len
    step = min(_CONTEXT_STEP, max(1, seq // 4))
    limit = min(MAX_CONTEXT, scenario.workload.total_tokens)
    own, last = rung_of(max(1, seq // step)), rung_of(max(1, limit // step))
    tokens, known = scenario.workload.tokens_per_step, scenario.model.max_seq_len
    ladder = _Ladder(
        question="longest_context",
        own=own,
        last=last,
        at=lambda rung: with_context(scenario, steps_of(rung) * step),
        value=lambda rung: steps_of(rung) * step,
        text=lambda rung: f"context {steps_of(rung) * step:,}",
        assumptions=(
            f"contexts are multiples of {step:,} tokens, beyond {FINE_RUNGS * step:,} a "
            f"{FINE_RUNGS // 2}th apart; the batch halves with every doubling, "
            f"so that a step holds no more than the scenario's {tokens:,} tokens while it can",
            f"beyond {known:,} positions the model needs a context extension (its own limit)",
        ),
    )
    return _largest(ladder, means)


def steps_of(rung: int) -> int:
    """Returns the multiple of the smallest step that rung 1, 2, ... of contexts stands for.

    Up to FINE_RUNGS each multiple is one; then each doubling has half as many.
    """
    half = FINE_RUNGS // 2
    if rung <= FINE_RUNGS:
        return rung
    doublings, beyond = divmod(rung - half, half)
    return (half + beyond) << doublings


def rung_of(steps: int) -> int:
    """Returns the last rung that stands for at most so many steps."""
    half = FINE_RUNGS // 2
    doublings = max(0, steps.bit_length() - FINE_RUNGS.bit_length() + 1)
    if steps <= FINE_RUNGS:
        return steps
    return half * doublings + (steps >> doublings)


def with_context(scenario: Scenario, seq_len: int) -> Scenario:
    """Returns the scenario at another context, its batch halved while a step has more tokens."""
    workload, model = scenario.workload, scenario.model
    batch = workload.global_batch_size
    while batch > 1 and batch * seq_len > workload.tokens_per_step and batch % 2 == 0:
        batch //= 2
    update = {"seq_len": seq_len, "global_batch_size": batch}
    return scenario.model_copy(
        update={
            "workload": _at_schedule(scenario, update),
            "model": model.model_copy(update={"max_seq_len": max(model.max_seq_len, seq_len)}),
        }
    )


def _at_schedule(scenario: Scenario, update: dict[str, int]) -> Workload:
    """Returns the workload with a new shape; the warm-up does not outlast the run."""
    changed = scenario.workload.model_copy(update=update)
    rate = changed.learning_rate
    steps = min(rate.warmup_steps, changed.num_steps)
    shorter = rate.model_copy(update={"warmup_steps": steps})
    return changed.model_copy(update={"learning_rate": shorter})


def largest_batch(scenario: Scenario, means: Means) -> Recommendation:
    """Returns the largest micro-batch that fits, the sequences a GPU works on at once.

    The batch of an optimizer step stays: it is not bound by memory, micro-batches add up.
    """
    sizes = divisors(scenario.workload.global_batch_size)
    seq = scenario.workload.seq_len

    def at(rung: int) -> Scenario:
        search = scenario.search.model_copy(update={"micro_batch_size": (sizes[rung - 1],)})
        return scenario.model_copy(update={"search": search})

    ladder = _Ladder(
        question="largest_batch",
        own=1,
        last=len(sizes),
        at=at,
        value=lambda rung: sizes[rung - 1],
        text=lambda rung: (
            f"micro-batch of {plural(sizes[rung - 1], 'sequence')} "
            f"({sizes[rung - 1] * seq:,} tokens)"
        ),
        assumptions=(
            f"the batch of a step stays at {scenario.workload.global_batch_size:,} sequences "
            "and the micro-batch divides it: by accumulation any batch fits",
        ),
    )
    return _largest(ladder, means)


def largest_model(scenario: Scenario, means: Means) -> Recommendation:
    """Returns the largest model of the scenario's family that fits."""
    family = scenario.model

    def model(rung: int) -> ModelSpec:
        return scaled(family, rung)

    def text(rung: int) -> str:
        total, active = num_params(model(rung)), num_active_params(model(rung))
        sparse = f", {show_count(active)} active" if family.moe is not None else ""
        size = f"hidden size {model(rung).hidden_size:,}"
        return f"{show_count(total)} weights{sparse} ({plural(rung, 'layer')}, {size})"

    ladder = _Ladder(
        question="largest_model",
        own=family.num_layers,
        last=MAX_SCALED_LAYERS,
        at=lambda rung: scenario.model_copy(update={"model": model(rung)}),
        value=lambda rung: num_params(model(rung)),
        text=text,
        assumptions=(
            "depth and heads grow by one factor, widths with the heads; head width, key-value "
            "heads of grouped attention, experts and vocabulary stay",
            "tokens and batch stay the scenario's",
        ),
    )
    return _largest(ladder, means)


def _largest(ladder: _Ladder, means: Means) -> Recommendation:
    """Returns the largest rung that fits, by doubling or halving and then bisection."""
    rows: dict[int, Room] = {}

    def holds(rung: int) -> bool:
        if rung not in rows:
            means.say(f"trying {ladder.text(rung)}")
            rows[rung] = room(ladder.at(rung), means)
        return rows[rung].fits

    low, high = _bracket(holds, min(ladder.own, ladder.last), ladder.last)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    low, high = _with_more_plans(ladder, rows, means, low, high)
    attempts = _attempts(ladder, rows)
    if low == 0:
        return Recommendation(
            question=ladder.question,
            found=False,
            answer=f"not even {ladder.text(1)} fits",
            missing=_lack(rows[1]),
            attempts=attempts,
            assumptions=ladder.assumptions,
        )
    means.say(f"planning {ladder.text(low)}")
    found = planned(ladder.at(low), means)
    return Recommendation(
        question=ladder.question,
        found=True,
        answer=f"{ladder.text(low)} fits" + _beyond(ladder, rows.get(high), high),
        value=ladder.value(low),
        attempts=attempts,
        scenario=found.scenario,
        plan=found.best,
        run=found.run,
        binding=bound_by(found, means),
        assumptions=(
            f"fits: {100 * found.scenario.search.memory_headroom:.3g} % of memory stays free "
            "(search.memory_headroom)",
            *ladder.assumptions,
            *assumptions_of(found),
        ),
    )


def _with_more_plans(
    ladder: _Ladder, rows: dict[int, Room], means: Means, low: int, high: int
) -> tuple[int, int]:
    """Returns (largest rung that holds, the next) once more plans are priced from `high` on.

    Where little is alive, or host memory is short, the lightest plans may be others.
    """

    def holds(rung: int) -> bool:
        means.say(f"trying {ladder.text(rung)} with more plans")
        rows[rung] = room(ladder.at(rung), means, "edge")
        return rows[rung].fits

    end, step = ladder.last + 1, 1
    while high < end and holds(high):
        low, high, step = high, min(high + step, end), 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def _bracket(holds: Callable[[int], bool], start: int, last: int) -> tuple[int, int]:
    """Returns (largest rung known to hold or 0, smallest known not to or last + 1)."""
    low, high = 0, last + 1
    rung = start
    if holds(rung):
        while rung < last and holds(rung):
            low, rung = rung, min(2 * rung, last)
        if holds(rung):
            return rung, high
        return low, rung
    while rung > 1:
        high, rung = rung, rung // 2
        if holds(rung):
            return rung, high
    return low, rung


def _attempts(ladder: _Ladder, rows: dict[int, Room]) -> tuple[Attempt, ...]:
    return tuple(
        Attempt(
            value=ladder.value(rung),
            tried=ladder.text(rung),
            holds=rows[rung].fits,
            why="fits" if rows[rung].fits else _lack(rows[rung]),
            missing_bytes=rows[rung].missing_bytes,
        )
        for rung in sorted(rows)
    )


def _lack(found: Room) -> str:
    if found.rules:
        return f"no plan is legal: {found.rules}"
    if not found.missing_bytes:
        return "host memory is missing"
    return f"the nearest plan lacks {show_bytes(found.missing_bytes)} a GPU"


def _beyond(ladder: _Ladder, beyond: Room | None, rung: int) -> str:
    if beyond is None:
        return ", and nothing larger was asked for"
    return f"; with {ladder.text(rung)} {_lack(beyond)}"
