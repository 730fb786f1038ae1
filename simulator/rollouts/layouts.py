"""One RL iteration under a layout: seconds by phase, what binds, staleness, throughput.

Co-located and split-synchronous layouts add their phases; one-step-off takes the slower of
generation and training; the asynchronous one is a stream (layouts_async.py). Every layout is
run on the same lengths, so that what differs is the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwright.simulator.rollouts.layouts_async import mean_length, run_async
from flopwright.simulator.rollouts.layouts_generation import Generation, generate
from flopwright.simulator.rollouts.layouts_lengths import GroupStream
from flopwright.simulator.rollouts.layouts_partial import PartialRounds
from flopwright.simulator.rollouts.layouts_replicas import run_replicas
from flopwright.spec.rollouts.layout import (
    Colocated,
    FullyAsync,
    LayoutInput,
    OneStepOff,
    ReplicaBatches,
)

_BATCHES = 3  # draws of a batch that a synchronous iteration is averaged over
_PARTIAL_WARM, _PARTIAL_KEPT = 4, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """One iteration in steady state.

    Attributes:
        step_s: seconds of a step.
        time_s: by phase on the driver: generation (or the wait for it), log_prob, update,
            sync, switch, driver. They sum to the step.
        generation_s: of a whole batch, slowest instance; engine_s: mean over instances;
            tail_s: at most a tenth of the responses still runs. 0 where batches have no end.
        tokens: prompt and response tokens of a step; response_tokens: without prompts.
        binds: "generation", "tail" (the last tenth is most of it), "training" or "sync".
        staleness: mean versions between first token and training; most: the largest.
        peak_tokens: most context an instance held; mean_tokens: on average while it had work;
            preempted: caches taken away.
        in_flight: responses that ran when the weights changed.
    """

    step_s: float
    time_s: dict[str, float]
    generation_s: float
    engine_s: float
    tail_s: float
    tokens: float
    response_tokens: float
    binds: str
    staleness: float
    most_stale: int
    peak_tokens: float
    mean_tokens: float
    preempted: int
    in_flight: float

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens over the step."""
        return self.tokens / self.step_s


def iteration(given: LayoutInput) -> IterationReport:
    """Returns one iteration of the loop.

    Raises:
        InputError: a context that no instance can hold, or an unknown mean length.
    """
    layout = given.layout
    if isinstance(layout, FullyAsync):
        return _stream(given)
    if isinstance(layout, ReplicaBatches):
        return _own_batches(given, layout)
    if isinstance(layout, Colocated) and layout.in_flight > 1:
        return _partial(given, layout.in_flight)
    return _in_turns(given)


def _in_turns(given: LayoutInput) -> IterationReport:
    batch, fleet = given.batch, given.fleet
    stream = GroupStream(batch.lengths, batch.samples, given.seed)
    draws = [stream.draw(batch.prompts) for _ in range(_BATCHES)]
    runs = [generate(fleet, batch.prompt_tokens, d, given.seed) for d in draws]
    generation_s = float(np.mean([r.seconds for r in runs])) + fleet.wake_s
    tokens = float(np.mean([d.sum() for d in draws]))
    times = given.times
    training_s = times.log_prob_s + times.update_s
    beside = isinstance(given.layout, OneStepOff)
    seen_s = max(0.0, generation_s - training_s) if beside else generation_s
    time_s = {
        "generation": seen_s,
        "log_prob": times.log_prob_s,
        "update": times.update_s,
        "sync": times.sync_s,
        "switch": times.switch_s,
        "driver": given.driver_s,
    }
    tail_s = float(np.mean([r.tail_s for r in runs]))
    return IterationReport(
        step_s=sum(time_s.values()),
        time_s=time_s,
        generation_s=generation_s,
        engine_s=float(np.mean([r.mean_engine_s for r in runs])),
        tail_s=tail_s,
        tokens=tokens + batch.responses * batch.prompt_tokens,
        response_tokens=tokens,
        binds=_binds(generation_s, tail_s, training_s, times.sync_s, beside=beside),
        staleness=1.0 if beside else 0.0,
        most_stale=1 if beside else 0,
        peak_tokens=max(r.peak_tokens for r in runs),
        mean_tokens=float(np.mean([r.mean_tokens for r in runs])),
        preempted=sum(r.preempted for r in runs),
        in_flight=0.0,
    )


def _binds(
    generation_s: float, tail_s: float, training_s: float, sync_s: float, *, beside: bool
) -> str:
    parts = {"generation": generation_s, "training": training_s, "sync": sync_s}
    name = max(parts, key=lambda k: parts[k])
    if name == "generation" and tail_s > generation_s / 2:
        return "tail"
    return name


def _partial(given: LayoutInput, in_flight: float) -> IterationReport:
    """More prompts than a step consumes are generated; the rest keeps its tokens."""
    batch, fleet, times = given.batch, given.fleet, given.times
    run = PartialRounds(given, round(in_flight * batch.prompts))
    for _ in range(_PARTIAL_WARM):
        run.round()
    kept = [run.round() for _ in range(_PARTIAL_KEPT)]
    generation_s = float(np.mean([k[0] for k in kept])) + fleet.wake_s
    tokens = float(np.mean([k[1] for k in kept]))
    lags = [lag for k in kept for lag in k[2]]
    share = tokens / (batch.responses * run.mean)
    update_s, log_prob_s = times.update_s * share, times.log_prob_s * share
    time_s = {
        "generation": generation_s,
        "log_prob": log_prob_s,
        "update": update_s,
        "sync": times.sync_s,
        "switch": times.switch_s,
        "driver": given.driver_s,
    }
    return IterationReport(
        step_s=sum(time_s.values()),
        time_s=time_s,
        generation_s=generation_s,
        engine_s=generation_s - fleet.wake_s,
        tail_s=0.0,
        tokens=tokens + batch.responses * batch.prompt_tokens,
        response_tokens=tokens,
        binds=_binds(generation_s, 0.0, update_s + log_prob_s, times.sync_s, beside=False),
        staleness=float(np.mean(lags)),
        most_stale=max(lags),
        peak_tokens=run.peak_tokens,
        mean_tokens=float(np.mean(run.mean_tokens)),
        preempted=run.preempted,
        in_flight=float(run.in_flight - batch.prompts) * batch.samples,
    )


def _stream(given: LayoutInput) -> IterationReport:
    run = run_async(given)
    step_s, wait_s = float(np.mean(run.step_s)), float(np.mean(run.wait_s))
    tokens = float(np.mean(run.tokens))
    times, batch = given.times, given.batch
    training = step_s - wait_s - times.sync_s - times.switch_s - given.driver_s
    whole = times.update_s + times.log_prob_s
    share = times.update_s / whole if whole > 0 else 1.0
    time_s = {
        "generation": wait_s,
        "log_prob": training * (1 - share),
        "update": training * share,
        "sync": times.sync_s,
        "switch": times.switch_s,
        "driver": given.driver_s,
    }
    return IterationReport(
        step_s=step_s,
        time_s=time_s,
        generation_s=0.0,
        engine_s=0.0,
        tail_s=0.0,
        tokens=tokens,
        response_tokens=tokens - batch.responses * batch.prompt_tokens,
        binds="generation" if wait_s > 0.05 * step_s else "training",
        staleness=float(np.mean(run.lags)),
        most_stale=max(run.lags),
        peak_tokens=run.peak_tokens,
        mean_tokens=run.mean_tokens,
        preempted=run.preempted,
        in_flight=float(np.mean(run.in_flight)),
    )


def _own_batches(given: LayoutInput, layout: ReplicaBatches) -> IterationReport:
    """Instances with batches of their own; the slower of generation and training sets the pace."""
    run, batch, times = run_replicas(given, layout), given.batch, given.times
    training_s = times.update_s + times.log_prob_s + given.driver_s
    tokens = batch.responses * mean_length(given)
    generation_s = tokens * run.seconds / run.tokens
    time_s = {
        "generation": max(0.0, generation_s - training_s),
        "log_prob": times.log_prob_s,
        "update": times.update_s,
        "sync": 0.0,
        "switch": 0.0,
        "driver": given.driver_s,
    }
    step_s = sum(time_s.values())
    return IterationReport(
        step_s=step_s,
        time_s=time_s,
        generation_s=generation_s,
        engine_s=generation_s,
        tail_s=0.0,
        tokens=tokens + batch.responses * batch.prompt_tokens,
        response_tokens=tokens,
        binds="generation" if generation_s > training_s else "training",
        staleness=float(np.mean(run.lags)),
        most_stale=max(run.lags),
        peak_tokens=run.peak_tokens,
        mean_tokens=run.context_s / run.busy_s if run.busy_s else 0.0,
        preempted=run.preempted,
        in_flight=float(given.fleet.instances * layout.prompts * batch.samples),
    )


__all__ = ["Generation", "IterationReport", "iteration"]
