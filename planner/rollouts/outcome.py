"""A candidate simulated: its mean iteration, rates, staleness, money, and what binds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from pydantic import Field, NonNegativeFloat

from flopwright.planner.rollouts.candidate import Candidate
from flopwright.planner.rollouts.choices import Choice
from flopwright.planner.rollouts.relaxed import relaxed
from flopwright.planner.rollouts.simulated import Fidelity, Simulations, loop_for
from flopwright.planner.rollouts.streamed import streamed
from flopwright.report.metrics import RoundMetrics
from flopwright.simulator.rollouts.report import RoundReport
from flopwright.spec.base import Spec
from flopwright.spec.loop import LoopScenario

_HOUR_S: Final = 3600.0


class Outcome(Spec):
    """The mean steady iteration of a loop.

    Attributes:
        attempts_per_s: completed attempts over the whole time.
        mean_staleness: policy versions behind when trained on, for want of newer weights.
        iteration: of the loop: where phases overlap, `time_s` has what is seen of each.
        gpus: of both phases and of a judge; gpu_hours, usd: of one iteration.
        lent_share: of the time, in which GPUs that train generate (elastic split).
        report: the rounds as they were simulated, phases one after the other; an asynchronous
            loop has no rounds.
    """

    attempts_per_s: NonNegativeFloat
    mean_staleness: NonNegativeFloat
    iteration: RoundMetrics
    gpus: int
    gpu_hours: NonNegativeFloat
    usd: float | None = None
    kv_use: float | None = None
    lent_share: float = 0.0
    report: RoundReport | None = Field(default=None, repr=False)

    @property
    def per_gpu(self) -> float:
        """Completed attempts a second and GPU."""
        return self.attempts_per_s / self.gpus


def outcome(
    loop: LoopScenario, candidate: Candidate, fidelity: Fidelity, known: Simulations
) -> Outcome:
    """Returns what a candidate does over steady rounds, after their warm-up.

    Raises:
        InputError: the round cannot run.
    """
    scenario, choice = candidate.scenario, candidate.choice
    assert scenario is not None
    if choice.layout == "async":
        versions = fidelity.rounds + (choice.staleness_bound or 0) + 2
        found = streamed(candidate, fidelity, known.seed, loop_for(scenario, versions))
        known.runs[fidelity.short] += 1
        rate, staleness = found.attempts_per_s, found.mean_staleness
        return _priced(loop, candidate, found.steady, rate, staleness, None, found.lent_share)
    report, metrics = known.steady(scenario, fidelity)
    steady, rate, staleness = report.steady, report.attempts_per_s, report.mean_staleness
    if choice.layout == "one_step_off":
        steady, rate = _overlapped(report, metrics)
        staleness += 1.0
    return _priced(loop, candidate, steady, rate, staleness, report)


def _priced(
    loop: LoopScenario,
    candidate: Candidate,
    steady: RoundMetrics,
    rate: float,
    staleness: float,
    report: RoundReport | None,
    lent_share: float = 0.0,
) -> Outcome:
    gpus = gpus_of(loop, candidate)
    gpu_hours = gpus * steady.round_time_s / _HOUR_S
    price = loop.cluster.price_usd_per_gpu_h if loop.cluster is not None else None
    assert candidate.scenario is not None
    capacity = candidate.scenario.kv_capacity_tokens
    return Outcome(
        attempts_per_s=rate,
        mean_staleness=staleness,
        iteration=steady,
        gpus=gpus,
        gpu_hours=gpu_hours,
        usd=None if price is None else price * gpu_hours,
        kv_use=None if not capacity else steady.kv_peak_tokens / capacity,
        report=report,
        lent_share=lent_share,
    )


def gpus_of(loop: LoopScenario, candidate: Candidate) -> int:
    """Returns the GPUs that are paid for."""
    judge = loop.rollout.reward.gpus
    if candidate.choice.layout == "colocated":
        return candidate.choice.generation_gpus + judge
    return candidate.choice.generation_gpus + candidate.update.gpus + judge


def _overlapped(
    report: RoundReport, metrics: Sequence[RoundMetrics]
) -> tuple[RoundMetrics, float]:
    """Returns the mean iteration where a batch is trained on while the next is generated.

    Each takes the longer of its generation and of the update on the batch before, then the
    weights go over. `metrics` begin one round before the kept ones.
    """
    generation = np.array([m.time_s["generation"] for m in metrics])
    update = np.array([m.time_s["update"] for m in metrics])
    rest = np.array([m.round_time_s for m in metrics]) - generation - update
    seen = np.maximum(generation[1:] - update[:-1], 0.0)
    seconds = seen + update[:-1] + rest[1:]
    time_s = dict(report.steady.time_s)
    time_s |= {"generation": float(seen.mean()), "update": float(update[:-1].mean())}
    mean_s = float(seconds.mean())
    steady = report.steady.model_copy(
        update={
            "round_time_s": mean_s,
            "time_s": time_s,
            "tokens_per_s": report.steady.generated_tokens / mean_s if mean_s > 0 else 0.0,
        }
    )
    completed = sum(m.completed for m in metrics[1:])
    total = float(seconds.sum())
    return steady, completed / total if total > 0 else float("inf")


def binding(
    loop: LoopScenario,
    candidate: Candidate,
    found: Outcome,
    fidelity: Fidelity,
    known: Simulations,
    time_is_up: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Returns by how much faster the loop would be without each thing, the most binding first.

    Args:
        time_is_up: asked before each; what is left then is not looked at.
    """
    gains: dict[str, float] = {}
    assert candidate.scenario is not None
    for name, scenario in relaxed(candidate.scenario).items():
        if time_is_up():
            break
        other = Candidate(
            choice=candidate.choice,
            scenario=scenario,
            update=candidate.update,
            hand_over=candidate.hand_over,
            memory=(),
            violations=(),
            most=0.0,
        )
        rate = outcome(loop, other, fidelity, known).attempts_per_s
        gains[name] = rate / found.attempts_per_s - 1
    return dict(sorted(gains.items(), key=lambda pair: -pair[1]))


def words(choice: Choice) -> str:
    """Returns a choice in short."""
    parts = [choice.layout.replace("_", "-")]
    parts.append(f"{choice.instances} x {choice.gpus_per_instance} GPUs")
    if choice.tp:
        parts.append(f"tp{choice.tp} ep{choice.ep}")
    parts.append(f"slots {choice.slots or 'all'}")
    if choice.layout != "async":
        parts.append(f"lambda {choice.stop_fraction:g}")
    else:
        parts.append(f"staleness at most {choice.staleness_bound}")
    if choice.host_pool_bytes:
        parts.append(f"pool {choice.host_pool_bytes / 2**30:,.0f} GiB a node")
        parts.append("parked" if choice.on_update == "park" else "released")
    if choice.layout == "colocated" and choice.states != "hbm":
        parts.append(f"states in {choice.states}")
    if choice.throttled:
        parts.append("throttled")
    if choice.elastic:
        parts.append("elastic")
    return ", ".join(parts)
