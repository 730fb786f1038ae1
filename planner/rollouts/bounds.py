"""The most attempts a second that a round can reach, whatever happens inside it.

Work is conserved: each completed attempt costs an instance at least its tokens at the best
batch, its context read at the best rate and its prompt, once. A cache of Q tokens lets fewer
attempts decode at once. And by Little's law the attempts in flight leave no faster than one
takes alone. None of it depends on the order, the tail, preemptions or the stop rule, so a
simulated round stays below; it may pass only by the noise of the lengths that it drew, for
which `noise` allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from flopwright.plan.rollout import stop_count
from flopwright.simulator.rollouts.lengths import Floats, LengthStream
from flopwright.spec.rollout import RolloutScenario, longest
from flopwright.spec.rollouts.agent import Agent
from flopwright.spec.rollouts.engine import PrefillTable, StepTable

_DRAWS: Final = 20_000
_DEVIATIONS: Final = 4.0


@dataclass(frozen=True, slots=True)
class Work:
    """What the mean attempt asks of an engine.

    Attributes:
        tokens: generated; context_tokens: context read, summed over its steps.
        tool_s: waiting for tools.
        deviation: standard deviation of the tokens over their mean.
    """

    tokens: float
    context_tokens: float
    tool_s: float
    deviation: float


def work_of(scenario: RolloutScenario) -> Work:
    """Returns the work of the mean attempt, from draws of the scenario's own law."""
    lengths, tool_s = _drawn(scenario, _DRAWS)
    context = scenario.prompt_tokens * lengths + lengths * (lengths - 1) / 2
    mean = float(lengths.mean())
    return Work(mean, float(context.mean()), tool_s, float(lengths.std()) / mean)


def acting_tokens(scenario: RolloutScenario, count: int) -> Floats:
    """Returns tokens that each of so many attempts generates, cut by budgets and contexts."""
    return _drawn(scenario, count)[0]


def _drawn(scenario: RolloutScenario, count: int) -> tuple[Floats, float]:
    lengths = LengthStream(scenario.lengths, seed=0x626F).draw(count).astype(np.float64)
    if scenario.effort is not None:
        lengths = np.minimum(lengths, scenario.effort.tokens)
    if scenario.agent is not None:
        return _acting(scenario, scenario.agent, lengths)
    return lengths, 0.0


def _acting(scenario: RolloutScenario, agent: Agent, lengths: Floats) -> tuple[Floats, float]:
    """Returns tokens that an acting attempt generates at least, and its seconds in tools."""
    added = _mean_tokens(agent.tool_tokens)
    if agent.tokens_per_turn is not None:
        turns = np.maximum(1.0, lengths / agent.tokens_per_turn)
    else:
        turns = np.full(len(lengths), max(1.0, _mean_tokens(agent.turns)))
    if agent.max_context is not None:
        whole = scenario.prompt_tokens + lengths + added * (turns - 1)
        share = np.minimum(1.0, agent.max_context / np.maximum(whole, 1.0))
        lengths, turns = lengths * share, turns * share
    at_most = agent.tool_time.at_most_s
    each = agent.tool_time.mean_s if at_most is None else min(agent.tool_time.mean_s, at_most)
    # A cut law has a smaller mean than the law itself: half of it stays a bound in practice.
    each *= 0.5 if at_most is not None and agent.tool_time.kind != "fixed" else 1.0
    return lengths, float(np.maximum(turns - 1, 0).mean() * each)


def _mean_tokens(law: object) -> float:
    if law is None:
        return 0.0
    return float(LengthStream(law, seed=1).draw(2000).mean())  # type: ignore[arg-type]


def step_table(scenario: RolloutScenario) -> StepTable:
    """Returns the scenario's decode steps as a table."""
    if scenario.engine is not None:
        return scenario.engine.decode
    decode = scenario.decode
    assert decode is not None
    return StepTable.linear(decode.a_s, decode.c_s, decode.kappa_s)


def prefill_table(scenario: RolloutScenario) -> PrefillTable:
    """Returns the scenario's prefill times; a round without any reads prompts in no time."""
    if scenario.engine is not None:
        return scenario.engine.prefill
    return scenario.prefill or PrefillTable()


def engine_s_per_attempt(scenario: RolloutScenario, work: Work) -> float:
    """Returns the seconds of one instance that a completed attempt costs at least."""
    engine = scenario.engine
    gained = engine.tokens_per_step if engine is not None else 1.0
    steps, read = work.tokens / gained, work.context_tokens / gained
    table = step_table(scenario)
    most = _largest_batch(scenario)
    mean_batch = float(most)
    capacity = scenario.kv_capacity_tokens
    if capacity is not None and read > 0:
        # What a step reads is at most the cache: so much for the batch of the mean step.
        mean_batch = min(mean_batch, capacity * steps / read)
    per_token_s, least_read_s = _cheapest(table, most, mean_batch)
    shared = scenario.samples_per_prompt if engine is not None and engine.prefix_cache else 1
    prompt = prefill_table(scenario).work_seconds(scenario.prompt_tokens) / shared
    beside = engine is not None and engine.chunk_tokens is not None
    return steps * per_token_s + read * least_read_s + (0.0 if beside else prompt)


def _largest_batch(scenario: RolloutScenario) -> int:
    """Returns the most attempts that an instance can ever decode at once."""
    limits = [scenario.num_attempts]
    if scenario.slots_per_instance is not None:
        limits.append(scenario.slots_per_instance)
    if scenario.engine is not None and scenario.engine.running_limit is not None:
        limits.append(scenario.engine.running_limit)
    if scenario.schedule.concurrency is not None:
        limits.append(scenario.schedule.concurrency)
    return max(1, min(limits))


def _cheapest(table: StepTable, most: int, mean_batch: float) -> tuple[float, float]:
    """Returns the least seconds of a token without its context, and of a token of context.

    Steps whose batches average to b cost at least the lower convex hull of the table at b
    (Jensen); an instance that idles between them averages over fewer steps.
    """
    points = sorted({1, most, *(b for b in table.batch if b <= most)})
    columns = [table.coefficients(b) for b in points]
    batch, base = np.array(points, float), np.array([c[0] for c in columns])
    least_read_s = min(c[1] for c in columns)
    if mean_batch <= 1:
        return float(base.min()) / max(mean_batch, 1e-9), least_read_s
    tried = np.array([b for b in points if b <= mean_batch] + [mean_batch])
    return float((np.interp(tried, *_lower_hull(batch, base)) / tried).min()), least_read_s


def _lower_hull(batch: Floats, base: Floats) -> tuple[Floats, Floats]:
    """Returns the corners of the lower convex hull of the points (batch, base), batch growing."""
    corners: list[int] = []
    for i in range(len(batch)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            rise = (base[b] - base[a]) * (batch[i] - batch[a])
            if rise < (base[i] - base[a]) * (batch[b] - batch[a]):
                break
            corners.pop()
        corners.append(i)
    return batch[corners], base[corners]


def most_generated_per_s(scenario: RolloutScenario, work: Work) -> float:
    """Returns the most attempts that can complete in a second of generation."""
    rate = scenario.instances / max(engine_s_per_attempt(scenario, work), 1e-12)
    table = step_table(scenario)
    gained = scenario.engine.tokens_per_step if scenario.engine is not None else 1.0
    alone_s = work.tokens / gained * min(table.base_s[0], table.coefficients(1)[0]) + work.tool_s
    return min(rate, scenario.num_attempts / alone_s) if alone_s > 0 else rate


def update_s(scenario: RolloutScenario, work: Work, completed: float) -> float:
    """Returns the seconds of an update on so many completed attempts."""
    tokens = completed * (work.tokens + scenario.prompt_tokens)
    return scenario.update.fixed_s + scenario.update.per_token_s * tokens


def noise(scenario: RolloutScenario, work: Work, rounds: int) -> float:
    """Returns by how much a simulated rate may pass its bound, as a share of it."""
    completed = max(1, rounds * stop_count(scenario.num_attempts, scenario.fraction))
    return _DEVIATIONS * work.deviation / math.sqrt(completed)


def most_per_s(
    scenario: RolloutScenario, work: Work, rounds: int, *, overlapped: bool = False
) -> float:
    """Returns the most attempts a second over whole iterations.

    Args:
        rounds: that a simulation keeps; the fewer, the more its lengths may be off.
        overlapped: the update runs beside generation, not after it.
    """
    attempts = scenario.num_attempts
    fixed = longest(scenario.lengths) == 1 or work.deviation < 1e-6
    tied = scenario.ties == "all" and (fixed or scenario.lengths.kind == "empirical")
    done = attempts if tied else stop_count(attempts, scenario.fraction)
    generation_s = done / most_generated_per_s(scenario, work)
    trained_s = update_s(scenario, work, done)
    rest_s = scenario.fixed_s - scenario.update.fixed_s
    busy_s = max(generation_s, trained_s) if overlapped else generation_s + trained_s
    return done / (busy_s + rest_s) * (1 + noise(scenario, work, rounds))
