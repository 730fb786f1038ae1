"""A candidate simulated: its mean iteration, rates, staleness, money, and what binds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Final

import numpy as np
from pydantic import Field, NonNegativeFloat

from flopwright.planner.rollouts.candidate import Candidate
from flopwright.planner.rollouts.choices import Choice
from flopwright.planner.rollouts.relaxed import relaxed
from flopwright.planner.rollouts.streamed import streamed
from flopwright.report.metrics import RoundMetrics
from flopwright.simulator.rollouts.drivers import Kind
from flopwright.simulator.rollouts.record import RoundRecord
from flopwright.simulator.rollouts.report import RoundReport, round_report, warmup_rounds
from flopwright.simulator.rollouts.rounds import simulate_rounds
from flopwright.spec.base import Spec
from flopwright.spec.loop import LoopScenario
from flopwright.spec.rollout import RolloutScenario

_HOUR_S: Final = 3600.0
_MANY_ATTEMPTS: Final = 5000  # over all rounds of one simulation


class Outcome(Spec):
    """The mean steady iteration of a loop.

    Attributes:
        attempts_per_s: completed attempts over the whole time.
        mean_staleness: policy versions behind when trained on, for want of newer weights.
        iteration: of the loop: where phases overlap, `time_s` has what is seen of each.
        gpus: of both phases and of a judge; gpu_hours, usd: of one iteration.
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
    report: RoundReport | None = Field(default=None, repr=False)

    @property
    def per_gpu(self) -> float:
        """Completed attempts a second and GPU."""
        return self.attempts_per_s / self.gpus


def outcome(loop: LoopScenario, candidate: Candidate, rounds: int, seed: int) -> Outcome:
    """Returns what a candidate does over steady rounds, after their warm-up.

    Raises:
        InputError: the round cannot run.
    """
    scenario, choice = candidate.scenario, candidate.choice
    assert scenario is not None
    if choice.layout == "async":
        steady, rate, staleness = streamed(scenario, choice, seed)
        return _priced(loop, candidate, steady, rate, staleness, None)
    warm = warmup_rounds(scenario.fraction)
    records = simulate_rounds(
        scenario, warm + rounds, seed, loop=loop_for(scenario, warm + rounds)
    )
    report = round_report(scenario, records[warm:], warmup=warm, seed=seed)
    steady, rate, staleness = report.steady, report.attempts_per_s, report.mean_staleness
    if choice.layout == "one_step_off":
        steady, rate = _overlapped(report, records[warm - 1 :])
        staleness += 1.0
    return _priced(loop, candidate, steady, rate, staleness, report)


def loop_for(scenario: RolloutScenario, rounds: int) -> Kind:
    """Returns which event loop runs: a search runs many rounds, so the compiled one pays early."""
    many = scenario.num_attempts * rounds >= _MANY_ATTEMPTS
    return "compiled" if many and find_spec("numba") is not None else "auto"


def _priced(
    loop: LoopScenario,
    candidate: Candidate,
    steady: RoundMetrics,
    rate: float,
    staleness: float,
    report: RoundReport | None,
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
    )


def gpus_of(loop: LoopScenario, candidate: Candidate) -> int:
    """Returns the GPUs that are paid for."""
    judge = loop.rollout.reward.gpus
    if candidate.choice.layout == "colocated":
        return candidate.choice.generation_gpus + judge
    return candidate.choice.generation_gpus + candidate.update.gpus + judge


def _overlapped(report: RoundReport, records: Sequence[RoundRecord]) -> tuple[RoundMetrics, float]:
    """Returns the mean iteration where a batch is trained on while the next is generated.

    Each takes the longer of its generation and of the update on the batch before, then the
    weights go over. `records` begin one round before the kept ones.
    """
    generation = np.array([r.metrics.time_s["generation"] for r in records])
    update = np.array([r.metrics.time_s["update"] for r in records])
    rest = np.array([r.metrics.round_time_s for r in records]) - generation - update
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
    completed = sum(r.metrics.completed for r in records[1:])
    total = float(seconds.sum())
    return steady, completed / total if total > 0 else float("inf")


def binding(
    loop: LoopScenario,
    candidate: Candidate,
    found: Outcome,
    rounds: int,
    seed: int,
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
        rate = outcome(loop, other, rounds, seed).attempts_per_s
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
    return ", ".join(parts)
