"""Published runs through the simulator: predictions with their intervals and labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from flopwright.errors import InputError
from flopwright.simulator.accuracy.features import simulated_step_s
from flopwright.simulator.accuracy.fit_stacks import StackLevels, interval80, stack_calibration
from flopwright.simulator.accuracy.fit_terms import run_labels
from flopwright.simulator.accuracy.gpu_names import canonical_gpu
from flopwright.simulator.accuracy.report import Skipped
from flopwright.simulator.accuracy.rows import has_speed, read_configurations
from flopwright.simulator.accuracy.run_of_row import APART, PublishedRun, PublishedRuns
from flopwright.simulator.accuracy.run_of_row_merge import source_family
from flopwright.simulator.accuracy.score import Scored
from flopwright.simulator.calibration.model import Calibration

Advance = Callable[[int, int], None]
# Flags that make a group of their own although their runs stay where they are.
_ALSO = frozenset({"lora", "reduced-layers", "amd"})


def calibration_of(run: PublishedRun, levels: StackLevels | None = None) -> Calibration:
    """Returns the calibration that a run is predicted with: its GPU's prior under its stack."""
    gpu = run.scenario.cluster.node.gpu
    return stack_calibration(run.stack, gpu, levels=levels, labels=run_labels(run))


def predictions(
    runs: Sequence[PublishedRun],
    levels: StackLevels | None = None,
    advance: Advance | None = None,
) -> tuple[tuple[Scored, ...], tuple[Skipped, ...]]:
    """Returns the step time of every run that has a measured one, and those without prediction."""
    timed = [r for r in runs if r.measured_step_s is not None]
    out, failed = [], []
    for done, run in enumerate(timed):
        calibration = calibration_of(run, levels)
        try:
            seconds = simulated_step_s(run, calibration)
        except InputError as error:
            failed += [_skipped(run, row, " ".join(str(error).split())) for row in run.row_ids]
        else:
            out.append(scored(run, seconds, calibration.step_residual_log))
        if advance is not None:
            advance(done + 1, len(timed))
    return tuple(out), tuple(failed)


def scored(run: PublishedRun, seconds: float, log_std: float) -> Scored:
    """Returns a run with its predicted step time.

    Args:
        log_std: standard deviation of log(measured / predicted).
    """
    assert run.measured_step_s is not None
    low, high = interval80(seconds, log_std)
    return Scored(
        id=run.id,
        measured=run.measured_step_s,
        predicted=seconds,
        low=low,
        high=high,
        labels=labels_of(run),
        cell=run.cell,
        sweep=run.sweep,
        assumed=run.assumed,
    )


def labels_of(run: PublishedRun) -> dict[str, str]:
    """Returns what a run is grouped by (report.LABELS), and where it stands apart."""
    precision = run.scenario.workload.precision
    recipe = precision.gemm
    flags = set(run.flags)
    also = sorted(flags & _ALSO)
    if run.source.startswith("via-research/vtrain") and "vtrain-single" not in flags:
        also.append("vtrain-multi" if not flags & {"odd", "tp-across-nodes"} else "vtrain-odd")
    return {
        "source": run.source,
        "gpu": run.gpu,
        "model": run.model_name,
        "family": run.stack.family,
        "stack": run.stack.label(),
        "framework": run.stack.framework,
        "precision": precision.compute if recipe == "same" else recipe,
        "recompute": run.plan.recompute,
        "cell": run.cell,
        "apart": " ".join(sorted(flags & APART)),
        "also": " ".join(also),
    }


def _skipped(run: PublishedRun, row: str, reason: str) -> Skipped:
    return Skipped(
        id=row, reason=reason, in_scope=run.in_overall, configuration=run.id,
        labels=labels_of(run),
    )  # fmt: skip


def skipped_rows(path: Path, published: PublishedRuns) -> tuple[Skipped, ...]:
    """Returns the rows of a file that gave no run, each with what it can be grouped by."""
    configurations, _ = read_configurations(path)
    by_row = {row: c for c in configurations for row in c.row_ids}
    out = []
    for row, reason in published.skipped:
        configuration = by_row.get(row)
        if configuration is None:
            out.append(Skipped(id=row, reason=reason, in_scope=False, configuration=row))
            continue
        gpu = configuration.text("gpu")
        out.append(
            Skipped(
                id=row,
                reason=reason,
                in_scope=has_speed(configuration) and not reason.startswith("out of scope"),
                configuration=configuration.id,
                labels={
                    "source": source_family(configuration),
                    "gpu": canonical_gpu(gpu) or gpu,
                    "model": configuration.text("model"),
                },
            )
        )
    return tuple(out)
