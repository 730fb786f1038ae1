"""The attempts of a scenario as they are submitted: lengths, turns, what tools say and take.

Every kind of draw has a stream of its own, in order of submission: the n-th attempt is the
same whatever the policy is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from flopwright.simulator.rollouts.lengths import Floats, Ints, LengthStream
from flopwright.spec.rollout import Agent, LengthSpec, Reward, RolloutScenario, TimeLaw

# Attempts whose turns are drawn together: with a thousand turns each, tens of megabytes.
_TOGETHER: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """New attempts.

    Attributes:
        total: tokens each generates in all; scores: the normal score of its prompt.
        estimate: tokens a predictor thinks it has.
        turns: turns of each; the other three hold the turns of all attempts, one after the
            other: tokens generated, tokens read from the tool after it, seconds of that call.
        verdict_s: seconds of work to judge each, where the round waits for that.
    """

    total: Ints
    scores: Floats
    estimate: Floats
    turns: Ints
    turn_tokens: Ints
    turn_read: Ints
    turn_s: Floats
    verdict_s: Floats


class Workload:
    """Attempts in order of submission.

    Args:
        restart: the streams of attempts that are begun anew, so that these shift no others.
    """

    def __init__(self, scenario: RolloutScenario, seed: int, restart: bool = False) -> None:
        self._scenario = scenario
        self._restart = restart
        base = seed + 2**32 if restart else seed
        self._lengths = LengthStream(
            scenario.lengths, base, scenario.samples_per_prompt, scenario.group_correlation
        )
        self._errors = np.random.default_rng([base, 0x657374])
        self._count = np.random.default_rng([base, 0x747572])
        self._read = np.random.default_rng([base, 0x726561])
        self._time = np.random.default_rng([base, 0x74696D])
        self._image = np.random.default_rng([base, 0x696D67])
        self._verdict = np.random.default_rng([base, 0x766572])

    def draw(self, ids: Ints, version: int) -> Drawn:
        """Returns the next attempts, those of these ids."""
        factor = self._scenario.drift.factor(version)
        total, scores = self._lengths.draw_scored(len(ids), factor)
        return self._whole(total, scores, ids)

    def again(self, ids: Ints, scores: Floats, version: int) -> Drawn:
        """Returns attempts begun anew for prompts with these scores."""
        factor = self._scenario.drift.factor(version)
        return self._whole(self._lengths.redraw(scores, factor), scores, ids)

    def _whole(self, total: Ints, scores: Floats, ids: Ints) -> Drawn:
        scenario = self._scenario
        if scenario.effort is not None:
            total = np.minimum(total, scenario.effort.tokens)
        none = np.zeros(len(ids), dtype=np.int64)
        turns, tokens, read, seconds = np.ones_like(none), total, none, none.astype(np.float64)
        if scenario.agent is not None:
            blocks = [
                self._turns(scenario.agent, total[i : i + _TOGETHER], ids[i : i + _TOGETHER])
                for i in range(0, max(1, len(ids)), _TOGETHER)
            ]
            total, turns, tokens, read, seconds = map(np.concatenate, zip(*blocks, strict=True))
        verdict_s = np.zeros(len(ids))
        if scenario.stop.rewarded:
            verdict_s = verdict_seconds(scenario.reward, self._verdict, total)
        estimate = total.astype(np.float64)
        if scenario.schedule.order == "longest_first" and scenario.schedule.estimate_sigma > 0:
            error = self._errors.standard_normal(len(ids))
            estimate = estimate * np.exp(scenario.schedule.estimate_sigma * error)
        return Drawn(
            total=total,
            scores=scores,
            estimate=estimate,
            turns=turns,
            turn_tokens=tokens,
            turn_read=read,
            turn_s=seconds,
            verdict_s=verdict_s,
        )

    def _turns(
        self, agent: Agent, total: Ints, ids: Ints
    ) -> tuple[Ints, Ints, Ints, Ints, Floats]:
        if agent.tokens_per_turn is not None:
            turns = -(-total // agent.tokens_per_turn)
        else:
            assert agent.turns is not None
            turns = np.minimum(draw_tokens(agent.turns, self._count, len(ids)), total)
        ends = np.cumsum(turns)
        place = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - turns, turns)
        tokens = np.repeat(total // turns, turns) + (place < np.repeat(total % turns, turns))
        last = place == np.repeat(turns - 1, turns)
        read = np.zeros(len(place), dtype=np.int64)
        if agent.tool_tokens is not None:
            read = draw_tokens(agent.tool_tokens, self._read, len(place))
        read[last] = 0
        seconds = draw_seconds(agent.tool_time, self._time, len(place))
        seconds += self._sandbox(agent, turns, place, ids)
        seconds[last] = 0.0
        if agent.max_context is not None:
            turns, tokens, read, seconds = self._cut(
                agent.max_context, turns, tokens, read, seconds
            )
            ends = np.cumsum(turns)
        total = np.add.reduceat(tokens, ends - turns) if len(ends) else total
        return total, turns, tokens, read, seconds

    def _sandbox(self, agent: Agent, turns: Ints, place: Ints, ids: Ints) -> Floats:
        """Returns the seconds that the sandbox adds to each tool call."""
        box = agent.sandbox
        first = np.full(len(turns), box.create_s)
        if box.image_hit < 1:
            first += box.image_pull_s * (self._image.random(len(turns)) >= box.image_hit)
        if box.fork_s is not None:
            first = np.where(ids % self._scenario.samples_per_prompt == 0, first, box.fork_s)
        later = box.resume_s if box.pause else 0.0
        return np.where(place == 0, np.repeat(first, turns), later)

    def _cut(
        self, most: int, turns: Ints, tokens: Ints, read: Ints, seconds: Floats
    ) -> tuple[Ints, Ints, Ints, Floats]:
        """Ends attempts where their context reaches `most` tokens, at least after one."""
        owner = np.repeat(np.arange(len(turns)), turns)
        both = tokens + read
        before = np.cumsum(both) - both
        starts = np.cumsum(turns) - turns
        begin = before - before[starts][owner] + self._scenario.prompt_tokens
        begin[starts] = np.minimum(begin[starts], most - 1)
        kept = begin < most
        tokens = np.minimum(tokens, np.maximum(most - begin, 1))
        turns = np.add.reduceat(kept.astype(np.int64), starts)
        tokens, read, seconds = tokens[kept], read[kept], seconds[kept]
        last = np.cumsum(turns) - 1
        read[last], seconds[last] = 0, 0.0
        return turns, tokens, read, seconds


def draw_tokens(lengths: LengthSpec, rng: np.random.Generator, count: int) -> Ints:
    """Returns whole numbers of a law, at least 1, from a given generator."""
    return LengthStream(lengths, rng=rng).draw(count)


def verdict_seconds(reward: Reward, rng: np.random.Generator, tokens: Ints) -> Floats:
    """Returns seconds of work to judge attempts of these tokens.

    In a tournament: of one comparison of two attempts as long as this one.
    """
    if reward.kind == "program":
        return draw_seconds(reward.time, rng, len(tokens))
    times = 2 if reward.kind == "tournament" else 1
    read_s = (reward.read_tokens + times * tokens) / reward.read_tokens_per_s
    return np.asarray(read_s + reward.verdict_tokens / reward.verdict_tokens_per_s)


def draw_seconds(law: TimeLaw, rng: np.random.Generator, count: int) -> Floats:
    """Returns times of a law."""
    mean = law.mean_s
    match law.kind:
        case "fixed":
            drawn = np.full(count, mean)
        case "exponential":
            drawn = rng.exponential(mean, count)
        case "lognormal":
            drawn = mean * np.exp(rng.normal(-(law.spread**2) / 2, law.spread, count))
        case "normal":
            drawn = np.maximum(rng.normal(mean, law.spread * mean, count), 0.0)
    return drawn if law.at_most_s is None else np.minimum(drawn, law.at_most_s)
