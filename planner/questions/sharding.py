"""Data parallelism: how far to shard, over how many ranks, and when replicas pay."""

from __future__ import annotations

from typing import Any, Final

from flopwright.errors import divisors
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.questions.answer import Answer, Replan
from flopwright.planner.questions.replan import (
    around,
    changed,
    fastest,
    replan,
    replans,
    with_gpus,
    with_workload,
)
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.scenario import Scenario
from flopwright.units import plural, show_bytes, show_percent, show_seconds

_ZERO_WORDS: Final = {
    0: "nothing sharded",
    1: "optimizer state sharded",
    2: "gradients and optimizer state sharded",
    3: "weights resharded after each use",
}
# How many times the cluster is tried to find where hybrid sharding starts to pay.
GROWTH: Final = (1, 2, 4, 8)


def _row(found: Replan) -> dict[str, Any]:
    return {
        "plan": found.plan.label(),
        "step_time_s": found.step_time_s,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
        "peak_bytes": found.peak_memory_bytes,
        "fits": found.fits,
    }


def sharding_stage(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns peak and step of every ZeRO stage: other FSDP wrappings and reshard settings."""
    variants = [
        (f"zero_stage {z}: {words}", changed(plan, {"zero_stage": z}))
        for z, words in _ZERO_WORDS.items()
    ]
    found = replans(scenario, variants, calibration)
    legal = [r for r in found if not r.violations]
    best = fastest(legal)
    rows = "; ".join(
        f"ZeRO-{r.plan.zero_stage}: {show_bytes(r.peak_memory_bytes)}, {show_seconds(r.priced_s)}"
        + ("" if r.fits else " (does not fit)")
        for r in legal
    )
    refused = [r for r in found if r.violations]
    why = (
        f" ZeRO-{refused[0].plan.zero_stage} and up: {refused[0].violations[0].rule}."
        if refused
        else ""
    )
    first = "Nothing fits"
    if best is not None:
        first = f"ZeRO-{best.plan.zero_stage} is the fastest that fits"
    return Answer(
        question="sharding_stage",
        text=f"{first}. {rows}.{why}",
        data={
            "zero_stage": best and best.plan.zero_stage,
            "by_stage": {str(r.plan.zero_stage): _row(r) for r in legal},
            "refused": {str(r.plan.zero_stage): r.violations[0].rule for r in refused},
        },
        replans=found,
    )


def data_parallel_size(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns step, throughput and peak with half and twice the data-parallel ranks.

    The global batch stays: more ranks run fewer micro-batches each.
    """
    found = [replan(scenario, plan, calibration)]
    for words, shard in (("half", plan.dp_shard // 2), ("twice", plan.dp_shard * 2)):
        if shard:
            other = changed(plan, {"dp_shard": shard})
            setting = with_gpus(scenario, other.world_size)
            change = f"{words} the data-parallel ranks ({other.dp})"
            found.append(replan(setting, other, calibration, change))
    base, legal = found[0], [r for r in found if not r.violations]
    rows = "; ".join(
        f"dp {r.plan.dp}: {show_seconds(r.priced_s)}, {r.tokens_per_s_per_gpu or 0:,.0f} "
        f"tokens/s/GPU, {show_bytes(r.peak_memory_bytes)}"
        for r in sorted(legal, key=lambda r: r.plan.dp)
    )
    cut = {1: ("optimizer_state",), 2: ("gradients", "optimizer_state")}
    sharded = cut.get(plan.zero_stage, ("weights", "gradients", "optimizer_state"))
    stays = {
        n: b for n, b in base.memory_bytes.items() if plan.zero_stage == 0 or n not in sharded
    }
    return Answer(
        question="data_parallel_size",
        text=f"{rows}. Of the peak, {show_bytes(sum(stays.values()))} does not shrink with dp: "
        f"{', '.join(n.replace('_', ' ') for n in stays)}.",
        data={
            "by_dp": {str(r.plan.dp): _row(r) for r in legal},
            "not_sharded_bytes": stays,
        },
        replans=tuple(found),
    )


def _hybrids(plan: ParallelPlan, zero: int) -> list[tuple[str, ParallelPlan]]:
    """Returns full sharding and every split of it into replicas, over the plan's dp ranks."""
    out = []
    for replicas in divisors(plan.dp):
        fields = {"dp_replicate": replicas, "dp_shard": plan.dp // replicas, "zero_stage": zero}
        words = "one shard group" if replicas == 1 else plural(replicas, "shard group")
        out.append((f"{words} of {plan.dp // replicas}", changed(plan, fields)))
    return out


def when_hybrid(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns from which cluster size on replicas of shard groups beat one shard group.

    The global batch grows with the ranks, so that every rank's work stays the same.
    """
    zero = max(plan.zero_stage, 3 if plan.pp == 1 else 1)
    found: list[Replan] = []
    rows: list[dict[str, Any]] = []
    for factor in GROWTH:
        wide = changed(plan, {"dp_shard": plan.dp_shard * factor})
        setting = with_workload(
            with_gpus(scenario, plan.world_size * factor),
            global_batch_size=scenario.workload.global_batch_size * factor,
        )
        priced = replans(setting, _hybrids(wide, zero), calibration)
        full, best = priced[0], fastest(priced)
        found += [full] if best is None or best is full else [full, best]
        rows.append(
            {
                "gpus": wide.world_size,
                "full_shard_s": full.step_time_s,
                "full_shard_fits": full.fits,
                "best_replicas": best and best.plan.dp_replicate,
                "best_s": best and best.step_time_s,
            }
        )
    start = next((r for r in rows if (r["best_replicas"] or 1) > 1), None)
    return Answer(
        question="when_hybrid",
        text=_hybrid_text(start, rows[-1]["gpus"], zero),
        data={"zero_stage": zero, "from_gpus": start and start["gpus"], "by_gpus": rows},
        replans=tuple(found),
    )


def _hybrid_text(start: dict[str, Any] | None, most_gpus: int, zero: int) -> str:
    if start is None:
        return f"Not up to {most_gpus:,} GPUs: one shard group is as fast, or no other fits."
    replicas = plural(start["best_replicas"], "shard group")
    if start["full_shard_s"] is None or not start["full_shard_fits"]:
        return f"From {start['gpus']:,} GPUs on, where {replicas} fit and one does not."
    gain = show_percent(1 - start["best_s"] / start["full_shard_s"])
    return (
        f"From {start['gpus']:,} GPUs on: {replicas} under ZeRO-{zero} take {gain} off the step "
        "of one group."
    )


def smaller_mesh(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns what sharding over fewer ranks (the rest replicas) costs in memory and saves."""
    zero = max(plan.zero_stage, 1)
    found = replans(scenario, _hybrids(plan, zero), calibration)
    full, legal = found[0], [r for r in found if not r.violations]
    best = fastest(legal)
    rows = [
        {
            "dp_shard": r.plan.dp_shard,
            "added_bytes": r.peak_memory_bytes - full.peak_memory_bytes,
            "saved_s": full.priced_s - r.priced_s,
            "fits": r.fits,
        }
        for r in legal
    ]
    if full.violations:
        text = f"The plan cannot be sharded: {full.violations[0].rule}."
    elif best is None:
        text = "No shard group fits."
    elif best is full:
        text = (
            f"No: shard over all {full.plan.dp_shard}; smaller groups are not faster, or lack "
            "memory."
        )
    else:
        text = (
            f"Yes: shard groups of {best.plan.dp_shard} take "
            f"{show_bytes(best.peak_memory_bytes - full.peak_memory_bytes)} more and save "
            f"{show_seconds(full.priced_s - best.priced_s)} a step under ZeRO-{zero}."
        )
    return Answer(
        question="smaller_mesh",
        text=text,
        data={"zero_stage": zero, "dp_shard": best and best.plan.dp_shard, "by_dp_shard": rows},
        replans=found,
    )


def keep_unsharded(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns whether weights may stay gathered after the forward: ZeRO-2 against ZeRO-3."""
    found = around(
        scenario,
        plan,
        calibration,
        [
            ("weights stay (zero_stage 2)", {"zero_stage": 2, "parameter_offload": False}),
            ("weights resharded (zero_stage 3)", {"zero_stage": 3}),
        ],
    )
    stays = next(r for r in found if r.plan.zero_stage == 2)
    again = next(r for r in found if r.plan.zero_stage == 3)
    if stays.violations or again.violations:
        rule = (*stays.violations, *again.violations)[0].rule
        return Answer(
            question="keep_unsharded",
            text=f"Neither is possible here: {rule}.",
            data={"possible": None},
            replans=found,
        )
    added = stays.peak_memory_bytes - again.peak_memory_bytes
    saved = again.priced_s - stays.priced_s
    verdict = "Yes" if stays.fits else "No, it does not fit"
    return Answer(
        question="keep_unsharded",
        text=f"{verdict}: keeping them takes {show_bytes(added)} more and saves "
        f"{show_seconds(saved)} ({show_percent(saved / again.priced_s)}) of the step.",
        data={"possible": stays.fits, "added_bytes": added, "saved_s": saved},
        replans=found,
    )
