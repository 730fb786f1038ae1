"""fallbacks.json: which plan to start when nodes are lost, for a supervisor outside the ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence

from flopwright.plan.file import PlanFile
from flopwright.planner.export.target import slug
from flopwright.planner.fallback import Fallback
from flopwright.report.metrics import Prediction
from flopwright.units import plural, show_bytes, show_percent, show_seconds

FALLBACKS_VERSION = 1


def fallbacks_json(plan: PlanFile, prediction: Prediction, found: Sequence[Fallback]) -> str:
    """Returns the plan's own size and the fallbacks, the largest first, as JSON (SI units)."""
    own = prediction.metrics
    rows = [
        {
            "file": f.file,
            "ranks": f.ranks,
            "nodes": f.nodes,
            "nodes_lost": f.nodes_lost,
            "step_time_s": f.step_time_s,
            "slower": f.slower,
            "peak_memory_bytes": f.peak_memory_bytes,
            "plan": f.plan.parallel.label(),
        }
        for f in found
    ]
    data = {
        "schema_version": FALLBACKS_VERSION,
        "plan_name": slug(plan.name),
        "global_batch_size": plan.scenario.workload.global_batch_size,
        "ranks": plan.parallel.world_size,
        "step_time_s": own.step_time_s,
        "peak_memory_bytes": own.peak_memory_bytes,
        "fallbacks": rows,
    }
    return json.dumps(data, indent=2) + "\n"


def fallback_header(fallback: Fallback) -> str:
    """Returns the comment that opens a fallback's plan file."""
    return (
        f"for {plural(fallback.ranks, 'rank')} on {plural(fallback.nodes, 'node')}, "
        f"{show_percent(fallback.slower)} longer a step; the same global batch"
    )


def fallbacks_section(found: Sequence[Fallback], ranks: int) -> str:
    """Returns the README's section on lost nodes."""
    head = "## When nodes are lost\n\n"
    if not found:
        return (
            f"{head}No plan was found for fewer than {plural(ranks, 'rank')} that fits and keeps "
            "the global batch (or none was asked for): the run waits for its nodes.\n"
        )
    rows = "".join(
        f"| {f.ranks:,} | {f.nodes:,} | {f.plan.parallel.label()} | "
        f"{show_seconds(f.step_time_s)} ({show_percent(f.slower)} longer) | "
        f"{show_bytes(f.peak_memory_bytes)} | `{f.file}` |\n"
        for f in found
    )
    return (
        f"{head}Take the first plan that the nodes left can hold, and start it from the last "
        "checkpoint; fallbacks.json has the same for a supervisor. The global batch is the "
        f"plan's: `flopwright export {found[0].file} --to {found[0].ranks}-ranks` writes its "
        "scripts.\n\n"
        "| ranks | nodes | plan | step | peak memory | file |\n|---|---|---|---|---|---|\n"
        f"{rows}"
    )
