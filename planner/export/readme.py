"""The README.md of an export bundle: what to paste, what to expect, when to stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import flopwright
from flopwright.plan.file import PlanFile
from flopwright.planner.export import deepspeed_json, torchrun
from flopwright.planner.export.check import check_bounds
from flopwright.planner.export.env import environment
from flopwright.planner.export.fallbacks import fallbacks_section
from flopwright.planner.export.sbatch import checkpoint_steps, time_limit_h, warning_s
from flopwright.planner.export.target import (
    RENDEZVOUS_PORT,
    TARGET_VERSIONS,
    WHEEL,
    placement,
    slug,
)
from flopwright.planner.export.torchrun import RUN_FOLDER
from flopwright.planner.fallback import Fallback
from flopwright.planner.whole_run import whole_run
from flopwright.report.check import CheckBounds
from flopwright.report.metrics import Prediction
from flopwright.units import GIB, plural, show_count, show_seconds

# What each file of the bundle is for; a test holds the list equal to the bundle.
FILES: Final = {
    "plan.yaml": "the plan: scenario, split, hashes; `flopwright run plan.yaml` runs it",
    "torchrun.sh": "starts the run on one node, or on each of several",
    "sbatch.sh": "the same as a Slurm job",
    "ENV.sh": "environment variables, each with its reason (the two scripts read it)",
    "deepspeed.json": "the plan for a training program of your own; torchrun.sh does not need it",
    "predicted.trace.json.gz": "the simulated step; open it at https://ui.perfetto.dev",
    "check.json": "bounds for the first steps",
    "measure.sh": "compares the run with check.json: continue, look or stop",
    "fallbacks.json": "plans for fewer nodes, each with its step time and memory",
    "manifest.json": "sha256 of every file, tool version, calibration",
}


def readme(
    plan: PlanFile,
    prediction: Prediction,
    refused: Sequence[str] = (),
    fallbacks: Sequence[Fallback] = (),
) -> str:
    """Returns README.md as text; all numbers come from the plan and its prediction.

    Args:
        plan: the plan file.
        prediction: of this plan.
        refused: what this version's executor does not run of the plan.
        fallbacks: plans for fewer nodes.
    """
    parts = (
        _title(plan),
        _refusal(refused),
        _run(plan, prediction),
        _expect(plan, prediction),
        _check(check_bounds(plan, prediction)),
        _memory(prediction),
        fallbacks_section(fallbacks, plan.parallel.world_size),
        _not_expressed(plan, prediction),
        _basis(plan, prediction),
        _files(plan, fallbacks),
    )
    return "\n".join(part for part in parts if part)


def _title(plan: PlanFile) -> str:
    scenario, parallel = plan.scenario, plan.parallel
    workload, where = scenario.workload, placement(plan)
    return (
        f"# {slug(plan.name)}\n\n"
        f"{scenario.model.name} with {show_count(workload.total_tokens)} tokens: "
        f"{workload.num_steps:,} steps of {workload.global_batch_size:,} sequences of "
        f"{workload.seq_len:,} tokens.\n"
        f"Split: **{parallel.label()}** on {parallel.world_size:,} ranks "
        f"({where.nodes:,} node{'s' if where.nodes > 1 else ''} x {where.ranks_per_node} "
        f"{scenario.cluster.node.gpu.name}).\n"
    )


def _refusal(refused: Sequence[str]) -> str:
    if not refused:
        return ""
    return (
        f"**flopwright {flopwright.__version__} does not run this plan yet**: its executor "
        f"refuses {', '.join(refused)}. The expectations below hold for a program that does "
        "what the plan says; deepspeed.json and plan.yaml describe it.\n"
    )


def _run(plan: PlanFile, prediction: Prediction) -> str:
    where = placement(plan)
    here = (
        "On this machine, from this folder:\n\n"
        f"```bash\n. ./ENV.sh && {torchrun.command(plan)} --text FOLDER_WITH_TEXT\n```\n\n"
        "which is what `./torchrun.sh --text FOLDER_WITH_TEXT` does."
        if where.nodes == 1
        else f"On each of the {where.nodes:,} nodes, from this folder:\n\n"
        f"```bash\nRDZV_ENDPOINT=FIRST_NODE:{RENDEZVOUS_PORT} "
        "./torchrun.sh --text FOLDER_WITH_TEXT\n```"
    )
    return (
        f"## Run it\n\n{here}\n\nUnder Slurm:\n\n"
        "```bash\nsbatch sbatch.sh --text FOLDER_WITH_TEXT\n```\n\n"
        f"{_job(plan, prediction)}\n"
        "Both need the environment active in which flopwright[train] is installed (below). "
        "Without `--text` the run trains on the sources of Python's standard library. A folder "
        f"holds one run: for another, move `{RUN_FOLDER}` away, or pass `--out run2` and then "
        "give `./measure.sh run2` that folder.\n\n"
        f"{_package()}"
    )


def _job(plan: PlanFile, prediction: Prediction) -> str:
    """Returns what the Slurm job does when it cannot run to its end in one go."""
    every, warned_s = checkpoint_steps(plan, prediction), warning_s(plan, prediction)
    return (
        f"The job saves every {plural(every, 'step')}. Slurm starts it again after a lost node or "
        "a preemption, and it goes on from the last checkpoint. "
        f"{show_seconds(warned_s)} before its --time is over (or after "
        "`scancel --batch --signal=TERM JOB`) it ends the steps under way, saves and queues "
        f"itself again; `scancel JOB` ends it for good. `{RUN_FOLDER}` must be on a file system "
        "that all nodes share.\n"
    )


def _package() -> str:
    """Returns how the package that runs the bundle gets to where it runs."""
    return (
        f"## Get flopwright {flopwright.__version__}\n\n"
        "It is on no package index. From a checkout of the version that wrote this bundle make "
        "its wheel, here:\n\n"
        "```bash\npython -m pip wheel --no-deps --wheel-dir . CHECKOUT_OF_FLOPWRIGHT\n```\n\n"
        "and install it with what training needs, once in an environment that all nodes see, or "
        "on each node:\n\n"
        f"```bash\npip install './{WHEEL}[train]'\n```\n\n"
        "From a git server instead: `pip install 'flopwright[train] @ git+ADDRESS@REVISION'`. "
        f"`flopwright --version` must say {flopwright.__version__}.\n"
    )


def _expect(plan: PlanFile, prediction: Prediction) -> str:
    metrics, interval = prediction.metrics, prediction.step_time_interval
    whole = whole_run(plan.scenario, prediction)
    days = whole.days_interval
    usd = "" if whole.usd is None else f" | money | {whole.usd:,.0f} USD |\n"
    hbm_bytes = plan.scenario.cluster.node.gpu.hbm_bytes
    lacks = " (**it does not fit**)" if metrics.peak_memory_bytes > hbm_bytes else ""
    return (
        "## What to expect\n\n"
        "| quantity | predicted |\n|---|---|\n"
        f"| step time | {show_seconds(metrics.step_time_s)} "
        f"({interval.probability:.0%} interval: {show_seconds(interval.low)} to "
        f"{show_seconds(interval.high)}) |\n"
        f"| peak memory of the fullest rank | {_gib(metrics.peak_memory_bytes)} of "
        f"{_gib(hbm_bytes)}{lacks} |\n"
        f"| tokens/s | {show_count(metrics.tokens_per_s)} |\n"
        f"| tokens/s a GPU | {metrics.tokens_per_s_per_gpu:,.4g} |\n"
        f"| MFU (dense peak, no recompute counted) | {metrics.mfu:.1%} |\n"
        f"| whole run | {show_seconds(86400 * whole.days)} "
        f"({show_seconds(86400 * days.low)} to {show_seconds(86400 * days.high)}), "
        f"{show_count(whole.gpu_hours)} GPU-hours |\n" + usd.lstrip()
    )


def _check(bounds: CheckBounds) -> str:
    return (
        f"## At step {bounds.after_steps}\n\n"
        "```bash\n./measure.sh        # exit code 0 continue, 1 look, 2 stop\n```\n\n"
        f"- **Step time**: the median after the first {bounds.discard_steps} steps lies between "
        f"{bounds.step_time_low_s:.4g} s and {bounds.step_time_high_s:.4g} s; outside it, look: "
        "compare the timeline of the run with predicted.trace.json.gz.\n"
        f"- **Peak memory**: at most {bounds.memory_margin:.0%} above "
        f"{_gib(bounds.peak_memory_bytes)}.\n"
        f"- **Loss**: finite, and below {bounds.loss_stop:.4g} nats a token (guessing evenly, "
        "plus a margin).\n\n"
        "**Stop rule.** Stop the run when measure.sh says stop: a loss that is not finite or is "
        f"above {bounds.loss_stop:.4g}, a median step time above {bounds.step_time_stop_s:.4g} s, "
        f"or a peak above {_gib(bounds.memory_stop_bytes)}. Outside an interval of "
        f"{bounds.interval_probability:.0%} is no reason to stop by itself: one good run in "
        f"{round(1 / (1 - bounds.interval_probability))} lands there.\n"
    )


def _memory(prediction: Prediction) -> str:
    stages = prediction.metrics.memory_bytes
    if not stages:
        return ""
    classes = [c for c in stages[0] if any(stage.get(c) for stage in stages)]
    head = " | ".join(f"{c.replace('_', ' ')} (GiB)" for c in classes)
    rows = "".join(
        f"| {i} | "
        + " | ".join(f"{stage.get(c, 0) / GIB:.3f}" for c in classes)
        + f" | {sum(stage.values()) / GIB:.3f} |\n"
        for i, stage in enumerate(stages)
    )
    return (
        "## Memory of the fullest rank of each pipeline stage\n\n"
        f"| stage | {head} | total (GiB) |\n|---{'|---' * len(classes)}|---|\n{rows}"
    )


def _not_expressed(plan: PlanFile, prediction: Prediction) -> str:
    rows = [f"deepspeed.json: {text}" for text in deepspeed_json.not_expressed(plan)]
    where, gpus = placement(plan), plan.scenario.cluster.node.gpus
    if where.ranks_per_node not in {gpus, plan.parallel.world_size}:
        rows.append(
            f"torchrun.sh, sbatch.sh: {where.ranks_per_node} ranks a node where a node has "
            f"{gpus}: torchrun starts equally many on each, the prediction fills nodes"
        )
    rows.append(
        "torchrun.sh: how often to save: without more arguments a run saves only at its end, and "
        "one that is interrupted is lost. --checkpoint-every STEPS --resume behind its name saves "
        "on the way, and goes on from the last checkpoint when it is started again "
        f"({RUN_FOLDER} must be on a file system that all nodes share)"
    )
    rows.append(
        f"sbatch.sh: the longest job the site allows: --time is {time_limit_h(plan, prediction)} "
        "h, the upper end of the predicted whole run rounded up to hours. With less (sbatch "
        "--time=...) the run takes several jobs"
    )
    rows.append("sbatch.sh: partition, account, qos and container: they are the site's")
    rows.append(
        "ENV.sh: the network interface (NCCL_SOCKET_IFNAME, NCCL_IB_HCA): it is the site's"
    )
    return "## Not expressed\n\n" + "".join(f"- {row}.\n" for row in rows)


def _basis(plan: PlanFile, prediction: Prediction) -> str:
    assumed = "".join(f"- {a}\n" for a in prediction.assumptions)
    calibration = prediction.calibration_id or "none (public figures only)"
    return (
        "## What the prediction rests on\n\n"
        f"Provenance: {prediction.provenance}. Calibration: {calibration}. "
        f"Plan made by flopwright {plan.tool_version}.\n"
        + (f"\nAssumed:\n\n{assumed}" if assumed else "")
    )


def _files(plan: PlanFile, fallbacks: Sequence[Fallback]) -> str:
    files = FILES | {f.file: f"the plan for {f.ranks:,} ranks" for f in fallbacks}
    rows = "".join(f"| `{name}` | {what} |\n" for name, what in files.items())
    versions = ", ".join(TARGET_VERSIONS.values())
    count = len(environment(plan))
    return (
        f"## Files\n\n| file | what |\n|---|---|\n{rows}\n"
        f"Formats: {versions}. ENV.sh sets {count} variables.\n"
    )


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3f} GiB" if nbytes < 10 * GIB else f"{nbytes / GIB:.1f} GiB"
