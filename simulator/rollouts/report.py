"""What many rounds say: the mean steady round, rates, staleness, memory, and what theory says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from pydantic import Field

from flopwright.plan.rollout import stop_count
from flopwright.report.metrics import RoundMetrics
from flopwright.simulator.rollouts import closed_forms
from flopwright.simulator.rollouts.lengths import Floats, Ints, clip_share, survival
from flopwright.simulator.rollouts.record import RoundRecord
from flopwright.simulator.rollouts.theory import budget_completions
from flopwright.spec.base import Spec
from flopwright.spec.rollout import RolloutScenario

WARMUP_SPANS: Final = 5  # rounds thrown away, in units of E[J] = 1 / lambda
_CURVE_POINTS: Final = 200


def assumptions_of(scenario: RolloutScenario) -> tuple[str, ...]:
    """Returns what the rounds leave out because the scenario says nothing of it."""
    prefill = scenario.prefill or (scenario.engine and scenario.engine.prefill)
    said = (
        (prefill, "prefill and the resumption of parked attempts take no time of their own"),
        (scenario.kv_capacity_tokens, "the cache is never short: KV capacity is not given"),
        (
            scenario.agent or scenario.reward.kind != "none",
            "rewards and environments take no time",
        ),
        (scenario.group_correlation, "lengths are independent, also within a prompt"),
    )
    return tuple(text for given, text in said if not given)


class RoundReport(Spec):
    """The steady rounds of one scenario at one lambda.

    Attributes:
        stop_count: completions that end a round, ceil(lambda * attempts_in_flight).
        rounds: the kept rounds, in order.
        steady: the mean kept round (counts rounded); staleness summed over the rounds,
            kv_peak_tokens the largest of them.
        attempts_per_s: completed attempts over the whole time, and its standard error.
        mean_staleness: mean policy versions behind at completion, by Little's law: attempts
            carried over a version a round, over completions a round. The histogram's mean
            tends to it, slowly where the tail is heavy.
        trained_staleness: histogram of the versions behind when the prompt was trained on,
            which counts the wait for its other samples too.
        off_policy_share: share of the completed attempts' tokens that older versions generated.
        parked_attempts: attempts that the mean round carries over with tokens; the rest of
            those not complete has not started.
        kv_peak_bytes: of the fullest instance; parked_bytes: at the end of the mean round,
            over all instances, prompts included.
        prefill_share: of the instances' time in generation that prefills took.
        recomputed_tokens: prefilled again in the mean round, because their cache was lost.
        evictions: caches of waiting attempts that lost their place, in the mean round.
        host_peak_bytes: of all host pools together at their fullest.
        tool_wait_s: mean seconds a tool call waited for a free sandbox.
        dropped_share: of generated tokens, thrown away for age or because they were cut off.
        masked_share: of the tokens trained on, too old to count in the loss.
        clipped_share: of completions, at the cap of their law (by the law itself).
        at_budget_share, verbose_share: of completions, at the effort budget, and beyond the
            verbosity limit.
        token_staleness: histogram: tokens trained on by versions behind.
        completion_curve: (seconds since the phase began, share of the attempts in flight that
            is complete), of the last round; the parked ones never appear.
        closed_forms: what theory says of the steady state, by name.
    """

    scenario: str
    stop_fraction: float = Field(alias="lambda")
    attempts_in_flight: int
    stop_count: int
    num_gpus: int
    seed: int
    warmup_rounds: int
    rounds: tuple[RoundMetrics, ...]
    steady: RoundMetrics
    attempts_per_s: float
    attempts_per_s_error: float
    mean_staleness: float
    trained_staleness: dict[int, int]
    off_policy_share: float
    mean_completed_length: float
    kv_peak_bytes: int
    kv_capacity_bytes: int | None = None
    parked_attempts: int
    parked_bytes: int
    prefill_share: float = 0.0
    recomputed_tokens: int = 0
    evictions: int = 0
    host_peak_bytes: int = 0
    tool_wait_s: float = 0.0
    dropped_share: float = 0.0
    masked_share: float = 0.0
    clipped_share: float = 0.0
    at_budget_share: float = 0.0
    verbose_share: float = 0.0
    token_staleness: dict[int, int] = Field(default_factory=dict)
    completion_curve: tuple[tuple[float, float], ...]
    closed_forms: dict[str, float]
    assumptions: tuple[str, ...]

    @property
    def kv_fits(self) -> bool:
        """Whether the fullest instance stays within its capacity (True where none is given)."""
        return self.kv_capacity_bytes is None or self.kv_peak_bytes <= self.kv_capacity_bytes

    @property
    def mean_trained_staleness(self) -> float:
        """Mean policy versions behind of the attempts trained on."""
        return histogram_mean(self.trained_staleness)


def histogram_mean(histogram: dict[int, int]) -> float:
    """Returns the mean of a histogram {value: count}; 0 for an empty one."""
    total = sum(histogram.values())
    return sum(k * v for k, v in histogram.items()) / total if total else 0.0


def warmup_rounds(stop_fraction: float) -> int:
    """Returns the rounds to throw away: five times the mean number an attempt spans.

    Attempts in flight at the start are all new, so the first rounds are shorter and their
    completions too.
    """
    return math.ceil(WARMUP_SPANS / stop_fraction)


def round_report(
    scenario: RolloutScenario, records: Sequence[RoundRecord], *, warmup: int, seed: int
) -> RoundReport:
    """Returns the report over kept rounds (at least one)."""
    metrics = [r.metrics for r in records]
    completed = np.array([m.completed for m in metrics])
    seconds = np.array([m.round_time_s for m in metrics])
    rate, error = _rate(completed, seconds)
    steady = mean_round(metrics)
    tokens = sum(int(r.lengths.sum()) for r in records)
    per_token = scenario.kv_bytes_per_token
    held = scenario.kv_capacity_tokens
    # One that has not started holds no KV: it waits outside the engines.
    parked_attempts = round(sum(r.carried for r in records) / len(records))
    parked = steady.parked_tokens + parked_attempts * scenario.prompt_tokens
    return RoundReport(
        scenario=scenario.name,
        stop_fraction=scenario.fraction,
        attempts_in_flight=scenario.num_attempts,
        stop_count=stop_count(scenario.num_attempts, scenario.fraction),
        num_gpus=scenario.num_gpus,
        seed=seed,
        warmup_rounds=warmup,
        rounds=tuple(metrics),
        steady=steady,
        attempts_per_s=rate,
        attempts_per_s_error=error,
        mean_staleness=sum(r.carried for r in records) / int(completed.sum()),
        trained_staleness=_histogram([r.trained_lags for r in records]),
        off_policy_share=sum(r.off_policy_tokens for r in records) / tokens,
        mean_completed_length=tokens / int(completed.sum()),
        kv_peak_bytes=round(steady.kv_peak_tokens * per_token),
        kv_capacity_bytes=None if held is None else round(held * per_token),
        parked_attempts=parked_attempts,
        parked_bytes=round(parked * per_token),
        completion_curve=_curve(records[-1].finish_s, scenario.num_attempts),
        closed_forms=theory(scenario),
        assumptions=assumptions_of(scenario) + assumed(scenario),
        **_pressure(scenario, records),
    )


def _pressure(scenario: RolloutScenario, records: Sequence[RoundRecord]) -> dict[str, Any]:
    """Returns what short caches, tools, age limits and budgets did, over all rounds."""
    phases, count = [r.phase for r in records], len(records)
    completed = max(1, sum(r.metrics.completed for r in records))
    generated = max(1, sum(r.metrics.generated_tokens for r in records))
    engine_s = sum(p.end_s for p in phases) * scenario.instances
    lags: dict[int, int] = {}
    for record in records:
        for lag, tokens in record.trained_token_lags.items():
            lags[lag] = lags.get(lag, 0) + tokens
    host = max(p.host_peak for p in phases) * scenario.kv_bytes_per_token
    return {
        "prefill_share": sum(p.prefill_s for p in phases) / engine_s if engine_s > 0 else 0.0,
        "recomputed_tokens": round(sum(p.recomputed_tokens for p in phases) / count),
        "evictions": round(sum(p.evictions for p in phases) / count),
        "host_peak_bytes": round(host),
        "tool_wait_s": sum(p.tool_wait_s for p in phases)
        / max(1, sum(p.tool_calls for p in phases)),
        "dropped_share": sum(r.dropped_tokens for r in records) / generated,
        "masked_share": sum(r.masked_tokens for r in records) / max(1, sum(lags.values())),
        "clipped_share": clip_share(scenario.lengths),
        "at_budget_share": sum(r.at_budget for r in records) / completed,
        "verbose_share": sum(r.verbose for r in records) / completed,
        "token_staleness": dict(sorted(lags.items())),
    }


def assumed(scenario: RolloutScenario) -> tuple[str, ...]:
    """Returns the scenario's inputs whose source says that they are assumed."""
    return tuple(
        f"{key}: {text}" for key, text in scenario.sources.items() if text.startswith("assumed")
    )


def mean_round(metrics: Sequence[RoundMetrics]) -> RoundMetrics:
    """Returns the mean of rounds; phases sum to its round time."""
    count = len(metrics)
    time_s = {k: sum(m.time_s[k] for m in metrics) / count for k in metrics[0].time_s}
    round_s = sum(time_s.values())
    generated = sum(m.generated_tokens for m in metrics)
    generation_s = sum(m.time_s["generation"] for m in metrics)
    staleness: dict[int, int] = {}
    for m in metrics:
        for lag, n in m.staleness.items():
            staleness[lag] = staleness.get(lag, 0) + n
    idle = sum(m.gpu_idle_share * m.time_s["generation"] for m in metrics)
    return RoundMetrics(
        round_time_s=round_s,
        time_s=time_s,
        tail_s=sum(m.tail_s for m in metrics) / count,
        gpu_idle_share=idle / generation_s if generation_s > 0 else 0.0,
        tokens_per_s=generated / (count * round_s) if round_s > 0 else 0.0,
        completed=round(sum(m.completed for m in metrics) / count),
        generated_tokens=round(generated / count),
        kv_peak_tokens=max(m.kv_peak_tokens for m in metrics),
        parked_tokens=round(sum(m.parked_tokens for m in metrics) / count),
        preemptions=round(sum(m.preemptions for m in metrics) / count),
        staleness=dict(sorted(staleness.items())),
    )


def _rate(completed: Ints, seconds: Floats) -> tuple[float, float]:
    """Returns completions over time and its standard error (rounds taken as independent)."""
    total_s, count = float(seconds.sum()), len(seconds)
    if total_s <= 0:
        return math.inf, 0.0
    rate = float(completed.sum()) / total_s
    if count < 2:
        return rate, 0.0
    residual = completed - rate * seconds
    return rate, float(residual.std(ddof=1) * math.sqrt(count) / total_s)


def _histogram(parts: Sequence[Ints]) -> dict[int, int]:
    values, counts = np.unique(np.concatenate(parts), return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _curve(finish_s: Floats, num_attempts: int) -> tuple[tuple[float, float], ...]:
    """Returns the completion curve, thinned to at most a few hundred points."""
    index = np.unique(np.linspace(0, len(finish_s) - 1, _CURVE_POINTS).round().astype(int))
    points = ((float(finish_s[i]), (int(i) + 1) / num_attempts) for i in index)
    return ((0.0, 0.0), *points)


def mean_spans(scenario: RolloutScenario) -> float:
    """Returns the mean number of rounds an attempt is in flight (Little's law)."""
    budget = scenario.stop.tokens
    if budget is None:
        return 1 / scenario.fraction
    law, attempts = survival(scenario.lengths), scenario.num_attempts
    return attempts / budget_completions(law, attempts, budget)


def theory(scenario: RolloutScenario) -> dict[str, float]:
    """Returns what closed forms say of the steady state; entries that do not apply are absent."""
    lengths, fraction = scenario.lengths, scenario.fraction
    mean, spans = closed_forms.mean_length(lengths), mean_spans(scenario)
    out = {
        "mean_length": mean,
        "mean_rounds_in_flight": spans,
        "mean_staleness": spans - 1,
        "expected_longest": closed_forms.expected_maximum(lengths, scenario.num_attempts),
    }
    plain = scenario.stop.keep and scenario.stop.count == "attempts" and scenario.effort is None
    if fraction < 1 and plain and scenario.staleness.rule in {"none", "mask"}:
        tau = closed_forms.tau_fluid(lengths, fraction)
        out["tau"] = tau
        out["off_policy_share"] = closed_forms.off_policy_share(tau, mean, fraction)
    generation_s = closed_forms.steady_generation_s(scenario)
    if generation_s is not None:
        out["generation_s"] = generation_s
    return out
