"""The plans next to a plan: which rule each breaks, what memory it lacks, or what it loses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from flopwright.errors import divisors
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.questions.answer import Replan
from flopwright.planner.questions.replan import Changes, around
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.candidates import RECOMPUTES
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario
from flopwright.units import show_bytes, show_percent

Outcome = Literal["breaks a rule", "does not fit", "slower", "faster", "equal"]
# Steps closer than this share are told as equal.
_EQUAL = 1e-6


class Neighbour(Spec):
    """One plan that differs in one choice.

    Attributes:
        behind: share of the step it is slower (negative: faster); None where it is illegal.
        missing_bytes: of GPU memory; 0 where it fits or is illegal.
        peak_memory_bytes: of the fullest GPU, on stage `stage`.
    """

    change: str
    plan: ParallelPlan
    outcome: Outcome
    text: str
    behind: float | None = None
    missing_bytes: int = 0
    peak_memory_bytes: int = 0
    stage: int = 0


def neighbours(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration
) -> tuple[Neighbour, ...]:
    """Returns every plan one choice away: the legal ones by step time, then the illegal."""
    base, *others = around(scenario, plan, calibration, _changes(scenario, plan))
    found = [_judged(other, base, scenario) for other in others]
    return tuple(sorted(found, key=lambda n: (n.behind is None, n.behind or 0.0, n.change)))


def _changes(scenario: Scenario, plan: ParallelPlan) -> Iterator[tuple[str, Changes]]:
    """Yields single choices; sizes of groups trade ranks with dp_shard."""
    for name in ("tp", "pp", "cp"):
        own = getattr(plan, name)
        for value in _beside(own, plan.dp_shard * own):
            yield f"{name} {value}", {name: value, "dp_shard": plan.dp_shard * own // value}
    if scenario.model.moe is not None:
        lending = plan.dp_shard * plan.cp * plan.tp
        for value in _beside(plan.ep, math.gcd(scenario.model.moe.num_experts, lending)):
            yield f"ep {value}", {"ep": value}
    per_rank = scenario.workload.global_batch_size // plan.dp
    for value in _beside(plan.micro_batch_size, max(per_rank, 1)):
        yield f"micro_batch_size {value}", {"micro_batch_size": value}
    for zero in range(4):
        yield f"zero_stage {zero}", {"zero_stage": zero}
    for policy in RECOMPUTES:
        yield f"recompute {policy}", {"recompute": policy}
    for name in ("fp8_activations", "activation_offload", "optimizer_offload", "fused_loss"):
        on = not getattr(plan, name)
        yield f"{name} {'on' if on else 'off'}", {name: on}
    if plan.pp > 1 and plan.schedule in {"1f1b", "interleaved_1f1b"}:
        for vpp in (plan.vpp - 1, plan.vpp + 1):
            schedule = "1f1b" if vpp == 1 else "interleaved_1f1b"
            if vpp:
                yield f"vpp {vpp}", {"vpp": vpp, "schedule": schedule}


def _beside(value: int, of: int) -> list[int]:
    """Returns the divisors of `of` next to `value`, one below and one above."""
    below = [d for d in divisors(of) if d < value][-1:]
    return below + [d for d in divisors(of) if d > value][:1]


def _judged(other: Replan, base: Replan, scenario: Scenario) -> Neighbour:
    if other.violations:
        first = other.violations[0]
        fix = f"; {first.nearest_fix}" if first.nearest_fix else ""
        return _neighbour(other, "breaks a rule", f"{first.field}: {first.rule}{fix}")
    behind = other.priced_s / base.priced_s - 1 if not base.violations else 0.0
    how = "as fast" if abs(behind) < _EQUAL else f"{show_percent(abs(behind))} "
    if abs(behind) >= _EQUAL:
        how += "slower" if behind > 0 else "faster"
    if not other.fits:
        missing = max(other.peak_memory_bytes - scenario.cluster.node.gpu.hbm_bytes, 0)
        lack = show_bytes(missing) if missing else "host memory"
        where = f" on stage {other.stage}" if missing else ""
        text = f"lacks {lack}{where}; with it {how}"
        return _neighbour(other, "does not fit", text, behind=behind, missing_bytes=missing)
    more = other.peak_memory_bytes - base.peak_memory_bytes
    memory = f"{show_bytes(abs(more))} {'more' if more >= 0 else 'less'} memory"
    outcome: Outcome = "slower" if behind > 0 else "faster"
    outcome = "equal" if abs(behind) < _EQUAL else outcome
    return _neighbour(other, outcome, f"{how}, {memory}", behind=behind)


def _neighbour(other: Replan, outcome: Outcome, text: str, **numbers: Any) -> Neighbour:
    return Neighbour(
        change=other.change,
        plan=other.plan,
        outcome=outcome,
        text=text,
        peak_memory_bytes=other.peak_memory_bytes,
        stage=other.stage,
        **numbers,
    )
