"""What peak is expected, how large a batch and how long a sequence fit, what the host holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Final

from flopwright.errors import divisors
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.questions.answer import Answer, Replan
from flopwright.planner.questions.replan import (
    around,
    changed,
    fastest,
    replan,
    replans,
    with_workload,
)
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.candidates import RECOMPUTES
from flopwright.spec.scenario import Scenario
from flopwright.units import plural, show_bytes, show_percent, show_seconds

MAX_BATCH_TRIED: Final = 64
# Sequences are told in steps of so many tokens, where a model's context is long.
_TOKENS: Final = 64


def expected_peak(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns the peak of the fullest GPU, its classes and what stays free."""
    found = replan(scenario, plan, calibration)
    limit = scenario.cluster.node.gpu.hbm_bytes
    classes = sorted(found.memory_bytes.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{n.replace('_', ' ')} {show_bytes(b)}" for n, b in classes if b)
    free = limit - found.peak_memory_bytes
    left = f"{show_bytes(free)} free" if free >= 0 else f"{show_bytes(-free)} too much"
    return Answer(
        question="expected_peak",
        text=f"{show_bytes(found.peak_memory_bytes)} on the fullest GPU ({left}): {parts}.",
        data={
            "peak_bytes": found.peak_memory_bytes,
            "limit_bytes": limit,
            "free_bytes": free,
            "memory_bytes": found.memory_bytes,
            "host_bytes_per_node": found.host_memory_bytes,
            "fits": found.fits,
        },
        replans=(found,),
    )


def best_batch(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns the micro-batch that makes the step shortest, with the plan's recompute or any."""
    per_rank = scenario.workload.global_batch_size // plan.dp
    sizes = [d for d in divisors(per_rank) if d <= MAX_BATCH_TRIED]
    found = around(
        scenario,
        plan,
        calibration,
        [
            (f"micro_batch_size {size}, recompute {policy}", _batch(plan, size, policy))
            for policy, size in product(RECOMPUTES, sizes)
        ],
    )
    own = [r for r in found if r.plan.recompute == plan.recompute]
    best, best_own = fastest(found), fastest(own)
    largest = max((r.plan.micro_batch_size for r in own if r.usable), default=0)
    if best is None:
        text = "No micro-batch fits, with any recompute policy."
    else:
        text = (
            f"{plural(best.plan.micro_batch_size, 'sequence')} a micro-batch with recompute "
            f"{best.plan.recompute}: {show_seconds(best.priced_s)} a step. "
        )
        text += (
            f"With recompute {plan.recompute} as planned nothing fits."
            if best_own is None
            else f"With recompute {plan.recompute} as planned the best is "
            f"{best_own.plan.micro_batch_size}, the largest that fits {largest}."
        )
    return Answer(
        question="best_batch",
        text=text,
        data={
            "micro_batch_size": best and best.plan.micro_batch_size,
            "recompute": best and best.plan.recompute,
            "step_time_s": best and best.step_time_s,
            "micro_batch_size_as_planned": best_own and best_own.plan.micro_batch_size,
            "largest_as_planned": largest,
        },
        replans=found,
    )


def _batch(plan: ParallelPlan, size: int, policy: str) -> dict[str, int | str]:
    own = policy == plan.recompute
    return {"micro_batch_size": size} | ({} if own else {"recompute": policy})


def longest_sequence(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns the longest context that fits: the plan as it is, and with any memory switches."""
    most = scenario.model.max_seq_len
    unit = plan.cp * plan.tp
    if most >= _TOKENS * _TOKENS:
        unit = math.lcm(unit, _TOKENS)
    switched = _memory_switches(plan)

    def tried(plans: list[ParallelPlan], seq_len: int) -> tuple[Replan, ...]:
        setting = with_workload(scenario, seq_len=seq_len)
        words = f"seq_len {seq_len}"
        return replans(setting, [(words, p) for p in plans], calibration)

    def longest(plans: list[ParallelPlan]) -> int:
        return unit * _largest(
            lambda n: any(r.usable for r in tried(plans, n * unit)), most // unit
        )

    own, any_ = longest([plan]), longest(switched)
    found = [replan(scenario, plan, calibration)]
    found += tried([plan], own) if own else ()
    best = fastest(tried(switched, any_)) if any_ else None
    found += [best] if best is not None and any_ > own else []
    bound = "the model's max_seq_len" if own + unit > most else "memory"
    text = f"{own:,} tokens with the plan as it is (the limit is {bound})"
    if any_ > own and best is not None:
        text += f"; {any_:,} with {best.plan.label()}"
    return Answer(
        question="longest_sequence",
        text=f"{text}. Sequences were tried in steps of {plural(unit, 'token')}.",
        data={
            "seq_len_as_planned": own,
            "seq_len_with_memory_switches": any_,
            "unit_tokens": unit,
            "limit": bound,
        },
        replans=tuple(found),
    )


def _memory_switches(plan: ParallelPlan) -> list[ParallelPlan]:
    """Returns the plan under every recompute policy, storage and place of activations."""
    switches = product(RECOMPUTES, (False, True), (False, True))
    made = [
        changed(plan, {"recompute": r, "fp8_activations": fp8, "activation_offload": away})
        for r, fp8, away in switches
    ]
    return list(dict.fromkeys([plan, *made]))


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """Returns the largest n up to `most` for which `holds`, which fails from some n on; or 0."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def optimizer_on_cpu(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns the GPU memory that optimizer state in host memory saves, and what it costs."""
    found = around(
        scenario,
        plan,
        calibration,
        [
            ("optimizer in host memory", {"optimizer_offload": True}),
            ("optimizer on the GPU", {"optimizer_offload": False}),
        ],
    )
    here = next(r for r in found if not r.plan.optimizer_offload)
    away = next(r for r in found if r.plan.optimizer_offload)
    if away.violations or here.violations:
        broken = (*away.violations, *here.violations)
        return Answer(
            question="optimizer_on_cpu",
            text=f"It cannot be moved: {broken[0].rule}.",
            data={"saved_bytes": None, "added_s": None},
            replans=found,
        )
    saved = here.peak_memory_bytes - away.peak_memory_bytes
    added = away.priced_s - here.priced_s
    host = away.host_memory_bytes - here.host_memory_bytes
    return Answer(
        question="optimizer_on_cpu",
        text=(
            f"It saves {show_bytes(saved)} of a GPU's peak and adds {show_seconds(added)} "
            f"({show_percent(added / here.priced_s)}) to the step; a node then holds "
            f"{show_bytes(host)} more in host memory"
            + ("." if away.fits or not here.fits else ", which does not fit.")
        ),
        data={
            "saved_bytes": saved,
            "added_s": added,
            "host_bytes_per_node": host,
            "as_planned": "host" if plan.optimizer_offload else "gpu",
        },
        replans=found,
    )
