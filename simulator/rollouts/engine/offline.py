"""Throughput of an engine given all requests at once, all of one length.

Requests are admitted as memory allows, several prompts a step; between two admissions or
completions nothing changes, so the steps between them are one sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.simulator.rollouts.engine.build import step_coefficients
from flopwright.simulator.rollouts.engine.cache import memory
from flopwright.simulator.rollouts.engine.price import Served, pass_seconds
from flopwright.simulator.rollouts.engine.rows import load
from flopwright.spec.rollouts.engine import Speculation

Terms = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """One offline run.

    Attributes:
        seconds: from the first prompt to the last token.
        output_tokens_per_s: of the whole instance; per_gpu: of one GPU of it.
        running_limit: sequences that a tp group may decode at once.
        mean_running: sequences of a tp group decoding at once, over the steps.
        prefill_share: share of the time in steps that hold a prompt.
    """

    seconds: float
    output_tokens_per_s: float
    per_gpu: float
    running_limit: int
    mean_running: float
    prefill_share: float


def running_limit(on: Served, total_tokens: int) -> int:
    """Returns the sequences of this whole length that a tp group decodes at once.

    Raises:
        InputError: not even one fits.
    """
    engine, held = on.software, memory(on)
    fits = held.sequences(total_tokens, engine.block_tokens)
    if fits < 1:
        raise InputError(
            Violation(
                field="output_tokens",
                value=str(total_tokens),
                rule=f"one sequence of {total_tokens} tokens does not fit the cache of a group: "
                f"{held.tokens()} tokens",
                nearest_fix="more GPUs an instance, a narrower cache or shorter sequences",
            )
        )
    return min(fits, engine.max_running)


@dataclass(slots=True)
class _Prices:
    """Step coefficients by padded batch and prompts in the step, each priced once."""

    on: Served
    prompt_tokens: int
    limit: int
    scale: Terms = (1.0, 1.0, 1.0)
    known: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def step(self, running: int, prompts: int) -> tuple[float, float]:
        """Returns (seconds without context, seconds a context token of a tp group)."""
        padded = self._padded(running) if not prompts else _rounded(running)
        key = (padded, prompts)
        if key not in self.known:
            batch = np.array([float(padded)])
            prompt = (float(prompts), float(self.prompt_tokens))
            base, slope = step_coefficients(self.on, batch, prompt=prompt)
            self.known[key] = self._scaled(float(base[0]), float(slope[0]) * self.on.shape.dp)
        return self.known[key]

    def _scaled(self, base_s: float, slope_s: float) -> tuple[float, float]:
        """Scales what one attempt alone costs, what the others add, and what context adds."""
        fixed, attempts, context = self.scale
        if self.scale == (1.0, 1.0, 1.0):
            return base_s, slope_s
        alone, _ = step_coefficients(self.on, np.array([1.0]))
        one = min(float(alone[0]), base_s)
        return fixed * one + attempts * (base_s - one), context * slope_s

    def _padded(self, running: int) -> int:
        graphs = [b for b in self.on.software.graph_batches if b >= running]
        return min([*graphs[:1], max(self.limit, running)]) if graphs else running


def _rounded(running: int) -> int:
    """Batches of steps with prompts are priced at two digits: their decode part is small."""
    if running < 16:
        return running
    step = 1 << (running.bit_length() - 4)
    return math.ceil(running / step) * step


def offline_run(
    on: Served, prompt_tokens: int, output_tokens: int, num_requests: int,
    scale: Terms = (1.0, 1.0, 1.0),
) -> OfflineRun:  # fmt: skip
    """Returns how long an instance takes for requests of one length, all queued at the start.

    The tp groups of an instance take equal parts and step together. A prompt's step yields its
    first token.

    Args:
        scale: factors on the three terms of a step: fixed, by attempt, by token of context.
    """
    dp, budget = on.shape.dp, on.software.max_step_tokens
    limit = running_limit(on, prompt_tokens + output_tokens)
    waiting = math.ceil(num_requests / dp)
    prices = _Prices(on, prompt_tokens, limit, scale)
    cohorts: list[list[int]] = []  # [sequences, tokens each has made]
    seconds = steps_with = token_steps = 0.0
    steps = 0
    while waiting or cohorts:
        running = sum(n for n, _ in cohorts)
        context = sum(n * (prompt_tokens + made) for n, made in cohorts)
        at_once = max((budget - running) // prompt_tokens, 1) if prompt_tokens else limit
        new = min(limit - running, waiting, at_once)
        count = 1 if new else output_tokens - max(made for _, made in cohorts)
        base, slope = prices.step(running, new)
        took = count * base + slope * (count * context + running * count * (count - 1) / 2)
        seconds += took
        steps_with += took if new else 0.0
        token_steps += (running + new) * count
        steps += count
        for cohort in cohorts:
            cohort[1] += count
        if new:
            cohorts.append([new, 1])
            waiting -= new
        cohorts = [c for c in cohorts if c[1] < output_tokens]
    made_tokens = num_requests * output_tokens
    return OfflineRun(
        seconds=seconds,
        output_tokens_per_s=made_tokens / seconds,
        per_gpu=made_tokens / seconds / on.shape.gpus,
        running_limit=limit,
        mean_running=token_steps / steps,
        prefill_share=steps_with / seconds,
    )


def decode_rate(
    on: Served, attempts: int, context_tokens: float, speculation: Speculation | None = None
) -> float:
    """Returns output tokens a second and GPU of a decode-only pool, prompts for free.

    Args:
        attempts: sequences of each tp group.
        context_tokens: mean context of each.
        speculation: drafts that every step verifies.
    """
    batch = np.array([float(attempts)])
    verified = 1.0 if speculation is None else 1.0 + speculation.drafts
    found = load(batch, batch * context_tokens, step_tokens=verified)
    seconds = float(pass_seconds(on, found).seconds[0])
    gained = 1.0
    if speculation is not None:
        seconds, gained = seconds + speculation.draft_s, speculation.tokens_per_step
    return attempts * gained / seconds / on.shape.tp


def prefill_rate(on: Served, prompt_tokens: int, tokens_per_pass: int) -> float:
    """Returns prompt tokens a second and GPU of a prefill-only pool of full passes."""
    prompts = tokens_per_pass / prompt_tokens
    pairs = prompts * prompt_tokens**2 / 2
    found = load(
        0.0, 0.0, prompts=prompts, prompt_tokens=float(tokens_per_pass), prompt_pairs=pairs
    )
    return float(tokens_per_pass / pass_seconds(on, found).seconds[0] / on.shape.tp)
