"""Activation recompute: which policy, which groups, how deep, and what it never gives back."""

from __future__ import annotations

from typing import Any, Final

from flopwright.plan.parallel import RECOMPUTE_TAGS, ParallelPlan
from flopwright.planner.questions.answer import Answer, Replan
from flopwright.planner.questions.modules import kept_parts
from flopwright.planner.questions.replan import around, changed, fastest, replans
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.candidates import RECOMPUTES
from flopwright.spec.scenario import Scenario
from flopwright.units import show_bytes, show_percent, show_seconds

# Depths of recompute tried first; those between the last that lacks and the first that fits
# follow.
_DEPTHS: Final = 8


def recompute_policy(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns which of the policies none, selective and full is the fastest that fits."""
    found = around(
        scenario,
        plan,
        calibration,
        [(f"recompute {p}", {"recompute": p, "recompute_tags": ()}) for p in RECOMPUTES],
    )
    best = fastest(found)
    rows = "; ".join(
        f"{r.plan.recompute}: {show_bytes(r.peak_memory_bytes)}, {show_seconds(r.priced_s)}"
        + ("" if r.fits else " (does not fit)")
        for r in found
        if not r.violations
    )
    chosen = "Nothing fits"
    if best is not None:
        chosen = f"Recompute {best.plan.recompute} is the fastest that fits"
    return Answer(
        question="recompute_policy",
        text=f"{chosen}. {rows}.",
        data={
            "policy": best and best.plan.recompute,
            "by_policy": {r.plan.recompute: _numbers(r) for r in found if not r.violations},
        },
        replans=found,
    )


def _numbers(found: Replan) -> dict[str, Any]:
    return {
        "peak_bytes": found.peak_memory_bytes,
        "step_time_s": found.step_time_s,
        "fits": found.fits,
    }


def recompute_groups(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns what dropping each group saves and costs against keeping all, and which pays."""
    none = changed(plan, {"recompute": "none"})
    variants = [("nothing recomputed", none), ("standard list", _selective(plan, ()))]
    variants += [(tag, _selective(plan, (tag,))) for tag in RECOMPUTE_TAGS]
    variants.append(("everything recomputed", changed(plan, {"recompute": "full"})))
    found = replans(scenario, variants, calibration)
    base = found[0]
    rows = {r.change: _saving(r, base) for r in found[1:] if not r.violations}
    rows = {name: row for name, row in rows.items() if row["saved_bytes"] > 0}
    rates = {
        name: row["saved_bytes"] / row["added_s"] if row["added_s"] > 0 else float("inf")
        for name, row in rows.items()
    }
    order = sorted(rows, key=lambda name: (-rates[name], name))
    best = fastest(found)
    told = [
        f"{name} {show_bytes(rows[name]['saved_bytes'])} {_price(rows[name]['added_s'])}"
        for name in order[:4]
    ]
    text = (
        "No group saves memory at the peak."
        if not told
        else f"Most saved a second: {', '.join(told)}."
    )
    text += " Nothing fits." if best is None else f" Fastest that fits: {best.change}."
    return Answer(
        question="recompute_groups",
        text=text,
        data={
            "by_group": rows,
            "best_by_bytes_per_s": order,
            "fastest_that_fits": best and best.change,
        },
        replans=found,
    )


def _price(added_s: float) -> str:
    return f"for {show_seconds(added_s)}" if added_s >= 0 else f"and {show_seconds(-added_s)} less"


def _selective(plan: ParallelPlan, tags: tuple[str, ...]) -> ParallelPlan:
    return changed(plan, {"recompute": "selective", "recompute_tags": tags})


def _saving(found: Replan, base: Replan) -> dict[str, Any]:
    return {
        "saved_bytes": base.peak_memory_bytes - found.peak_memory_bytes,
        "added_s": found.priced_s - base.priced_s,
        "fits": found.fits,
    }


def recompute_depth(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns how few layers of each chunk have to be recomputed for the plan to fit."""
    layers = max(len(c) for c in plan.chunk_layers(scenario.model.num_layers))

    def tried(depths: list[int]) -> list[Replan]:
        fields = [{"recompute": "full", "recompute_layers": n} for n in depths]
        variants = [
            (f"{n} of {layers} layers a chunk", changed(plan, f))
            for n, f in zip(depths, fields, strict=True)
        ]
        return list(replans(scenario, variants, calibration))

    samples = sorted({round(layers * i / _DEPTHS) for i in range(_DEPTHS + 1)})
    found = tried(samples)
    first = next((n for n, r in zip(samples, found, strict=True) if r.usable), None)
    if first:
        below = samples[samples.index(first) - 1]
        found += tried(list(range(below + 1, first)))
        found.sort(key=lambda r: r.plan.recompute_layers or 0)
    fewest = next((r for r in found if r.usable), None)
    every = found[-1]
    if fewest is None:
        text = f"Not even recomputing all {layers} layers of each chunk fits."
    elif fewest.plan.recompute_layers == 0:
        text = f"No layer has to be recomputed: {show_seconds(fewest.priced_s)} a step."
    else:
        text = (
            f"The first {fewest.plan.recompute_layers} of {layers} layers of each chunk: "
            f"{show_seconds(fewest.priced_s)} a step, against {show_seconds(every.priced_s)} "
            "with all of them."
        )
    return Answer(
        question="recompute_depth",
        text=text,
        data={
            "layers": fewest and fewest.plan.recompute_layers,
            "of_layers": layers,
            "by_layers": {
                str(r.plan.recompute_layers): _numbers(r) for r in found if not r.violations
            },
        },
        replans=tuple(found),
    )


def what_recompute_keeps(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration
) -> Answer:
    """Returns what stays in memory when every layer is recomputed, and why."""
    plain = {"activation_offload": False, "fp8_activations": False}
    none = changed(plan, {"recompute": "none", **plain})
    full = changed(plan, {"recompute": "full", **plain})
    keeps, drops = replans(
        scenario, [("nothing recomputed", none), ("every layer recomputed", full)], calibration
    )
    before, after = (r.memory_bytes.get("activations", 0) for r in (keeps, drops))
    parts = kept_parts(scenario, drops, calibration)
    moment = drops.memory_bytes.get("temporaries", 0)
    never = {
        name: drops.memory_bytes.get(name, 0)
        for name in ("weights", "gradients", "optimizer_state", "reserved")
    }
    total = sum(never.values())
    saved = keeps.peak_memory_bytes - drops.peak_memory_bytes
    inputs = parts.get("layer inputs", 0)
    text = (
        f"Recomputing every layer takes activations from {show_bytes(before)} to "
        f"{show_bytes(after)} and the peak down by {show_bytes(saved)}. What stays: the input of "
        f"each layer ({show_bytes(inputs)}), what embedding and head keep "
        f"({show_bytes(after - inputs)}), the layer under way and its gradients "
        f"({show_bytes(moment)}), and {show_bytes(total)} "
        f"({show_percent(total / max(drops.peak_memory_bytes, 1))} of the peak) of weights, "
        "gradients, optimizer state and reserve that recompute never touches."
    )
    return Answer(
        question="what_recompute_keeps",
        text=text,
        data={
            "activations_none_bytes": before,
            "activations_full_bytes": after,
            "kept_by_module_bytes": parts,
            "temporaries_none_bytes": keeps.memory_bytes.get("temporaries", 0),
            "temporaries_full_bytes": moment,
            "untouched_bytes": never,
            "saved_bytes": saved,
        },
        replans=(keeps, drops),
    )
