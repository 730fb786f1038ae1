"""The steps of `flopwright demo`, each through the functions that its own verb calls."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console

from flopwright.errors import InputError, Violation
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file
from flopwright.spec.scenario import Scenario

if TYPE_CHECKING:
    from flopwright.executor.launch.local import RunResult
    from flopwright.report.compare_report import ComparisonReport
    from flopwright.simulator.calibration.model import Calibration

PAPER_SCENARIO: Final = "kimi_k2_pretrain_2048gpu_h800_bf16"
MINI_SCENARIO: Final = "kimi_k2_mini_2cpu_fp32"
MARKER_FILE: Final = "demo.json"
PROBE_FILE: Final = "probe.calibration.yaml"
CALIBRATION_FILE: Final = "calibration.yaml"
PROBE_BUDGET_S: Final = 30.0

# Three ways to split the mini run over two ranks. The held one is predicted, not learnt from.
DATA_PARALLEL: Final = ParallelPlan(dp_shard=2, micro_batch_size=4, zero_stage=1)
PIPELINE: Final = ParallelPlan(pp=2, micro_batch_size=4, data_parallel="none")
EXPERT_PARALLEL: Final = ParallelPlan(dp_shard=2, ep=2, micro_batch_size=4, zero_stage=1)
PLANS: Final = {"dp2-zero1": DATA_PARALLEL, "pp2": PIPELINE, "ep2-zero1": EXPERT_PARALLEL}
# What a demo writes into its folder.
OWN: Final = (
    "run",
    "store.sqlite",
    "store.sqlite-wal",
    "store.sqlite-shm",
    "k2_2048_h800.plan.yaml",
    "compare.png",
    "compare.html",
    "compare.json",
    PROBE_FILE,
    CALIBRATION_FILE,
    *(f"{name}.plan.yaml" for name in PLANS),
)
HELD: Final = "ep2-zero1"
TWIN: Final = "dp2-zero1-again"  # the first plan under a second name shows the noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What the user asked for, and where words go."""

    out: Path
    steps: int
    text: Path | None
    seed: int
    console: Console

    def title(self, number: int, text: str) -> None:
        """Writes the heading of a step."""
        self.console.rule(f"[bold]{number}/5 {text}", align="left")


def run_demo(*, out: Path, steps: int, text: Path | None, seed: int, quiet: bool) -> None:
    """Runs every step; the last line printed is the JSON object of conventions."""
    started = time.monotonic()
    _prepare_folder(out)
    demo = Demo(out=out, steps=steps, text=text, seed=seed, console=_console(quiet))
    demo.title(1, "Kimi K2 on paper: 15.5T tokens on 2,048 H800s")
    _plan_on_paper(demo)
    demo.title(2, "A mini K2 for real: three plans in turns on two ranks of this machine")
    result = _run_for_real(demo, quiet)
    demo.title(3, f"Calibrate on {' and '.join(n for n in PLANS if n != HELD)}")
    probed, calibrated = _calibrate(demo, result)
    demo.title(4, f"Predict {HELD}, which the calibration has not seen, and compare")
    report = _compare(demo, result, probed, calibrated)
    demo.title(5, "Where to look next")
    _where_next(demo)
    summary = _summary(result, report, time.monotonic() - started)
    (out / MARKER_FILE).write_text(json.dumps(summary, indent=1), encoding="utf-8")
    typer.echo(json.dumps(summary))


def _console(quiet: bool) -> Console:
    """Returns a console wide enough for the tables where the output is not a terminal."""
    return Console(quiet=quiet, width=None if sys.stdout.isatty() else 120)


def _prepare_folder(out: Path) -> None:
    """Makes room for a new demo: what an earlier one wrote goes, anything else stays."""
    if out.exists() and any(out.iterdir()):
        if not (out / MARKER_FILE).exists():
            raise InputError(
                Violation(
                    field="--out",
                    value=str(out),
                    rule="the folder is not empty and was not written by a demo",
                    nearest_fix="name another folder",
                )
            )
        for name in OWN:
            path = out / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    # Written first: a demo that was cut short may be run again into the same folder.
    (out / MARKER_FILE).write_text("{}", encoding="utf-8")


def _plan_on_paper(demo: Demo) -> None:
    from flopwright.cli.plan import plan

    if demo.console.quiet:
        return
    plan(
        scenario=PAPER_SCENARIO,
        out=demo.out / "k2_2048_h800.plan.yaml",
        rank=1,
        top=5,
        calibration=None,
    )


def _write_plans(demo: Demo, scenario: Scenario) -> dict[str, Path]:
    paths = {}
    for name, parallel in PLANS.items():
        path = demo.out / f"{name}.plan.yaml"
        record = make_plan_file(scenario, parallel, name)
        path.write_text(dump_yaml(record, "written by flopwright demo"), encoding="utf-8")
        paths[name] = path
    return paths


def _run_for_real(demo: Demo, quiet: bool) -> RunResult:
    from flopwright.cli.run import _report, progress_display
    from flopwright.executor.launch.checks import LaunchOptions
    from flopwright.executor.launch.local import RunFailedError, launch
    from flopwright.store import open_store

    paths = _write_plans(demo, load_scenario(MINI_SCENARIO))
    entries = [*paths.values(), paths["dp2-zero1"]]
    options = LaunchOptions(
        steps=demo.steps,
        nproc=2,
        text=demo.text,
        names=(*paths, TWIN),
        seed=demo.seed,
        probe=True,
        probe_budget_s=PROBE_BUDGET_S,
    )
    try:
        with progress_display(quiet=quiet) as show:
            result = launch(entries, demo.out / "run", options, show)
    except RunFailedError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    store = open_store(_store_url(demo))
    for measurement in result.measurements:
        store.add(measurement)
    if not quiet:
        _report(result, _store_url(demo))
    return result


def _store_url(demo: Demo) -> str:
    return f"sqlite:///{demo.out / 'store.sqlite'}"


def _calibrate(demo: Demo, result: RunResult) -> tuple[Calibration, Calibration]:
    from flopwright.simulator.calibration.files import save_calibration
    from flopwright.simulator.calibration.fit_probe import fit_probe
    from flopwright.simulator.calibration.fit_runs import fit_runs
    from flopwright.simulator.calibration.repredict import predict_measurement

    assert result.probe is not None
    probed = fit_probe(result.probe)
    learnt = [m for m in result.measurements if m.plan_name != HELD]
    calibrated = fit_runs(probed, learnt, predict_measurement)
    for calibration, name in ((probed, PROBE_FILE), (calibrated, CALIBRATION_FILE)):
        save_calibration(calibration, demo.out / name)
        save_calibration(calibration)  # the user's own: the dashboard offers it by id
    factors = ", ".join(f"{name} x{value:.2f}" for name, value in calibrated.factors.items())
    demo.console.print(
        f"from the probe: {len(probed.curves)} operator curves, {len(probed.collectives)} "
        f"collectives; from {len(learnt)} runs of two plans: {factors}",
        highlight=False,
    )
    return probed, calibrated


def _compare(
    demo: Demo, result: RunResult, before: Calibration, after: Calibration
) -> ComparisonReport:
    from flopwright.cli._compare_view import show
    from flopwright.report.compare_html import comparison_html
    from flopwright.report.compare_png import comparison_png
    from flopwright.report.compare_report import make_report
    from flopwright.simulator.comparison.run import compared_run

    report = make_report(compared_run(m, before, after) for m in result.measurements)
    (demo.out / "compare.png").write_bytes(comparison_png(report))
    (demo.out / "compare.html").write_text(comparison_html(report), encoding="utf-8")
    (demo.out / "compare.json").write_text(report.model_dump_json(indent=1), encoding="utf-8")
    show(demo.console, report)
    return report


def _where_next(demo: Demo) -> None:
    out, store = demo.out, _store_url(demo)
    lines = (
        (f"{out}/compare.png", "predicted against measured, as a picture (.html, .json too)"),
        (f"{out}/run/trace-pp2.json", "one real step; open it in https://ui.perfetto.dev"),
        (f"{out}/k2_2048_h800.plan.yaml", "the K2 plan; export it:"),
        ("", f"flopwright export {out}/k2_2048_h800.plan.yaml --to {out.parent}/k2_bundle"),
        ("", f"flopwright generate {out}/run/checkpoint-pp2 --prompt 'def '"),
        (
            "",
            f"flopwright compare --store {store} --before {out}/{PROBE_FILE} "
            f"--calibration {out}/{CALIBRATION_FILE}",
        ),
        ("", "flopwright rollouts kimi_k2_like_256gpu_h800 --sweep"),
        ("", f"flopwright dashboard --store {store}"),
    )
    for path, text in lines:
        demo.console.print(f"  {path + '  ' if path else '  .venv/bin/'}{text}", highlight=False)


def _summary(result: RunResult, report: ComparisonReport, wall_s: float) -> dict[str, Any]:
    from flopwright.executor.data.batches import open_dataset
    from flopwright.executor.launch.request import DATA_DIR

    request = result.request
    first = request.entries[0]
    dataset = open_dataset(result.out_dir / DATA_DIR, request.workload(first))
    entropies = dataset.entropies(request.held_out_sequences)
    by_name = {m.plan_name: m for m in result.measurements}
    (held,) = (r.after for r in report.runs if r.plan_name == HELD)
    step_error, memory_error = held.error("step_time_s"), held.error("tensor_memory_bytes")
    fingerprint = by_name[HELD].fingerprint
    steps = [m.step_time_samples_s for m in result.measurements]
    spreads = [(m.step_time_p90_s - m.step_time_p10_s) / m.metrics.step_time_s
               for m in result.measurements]  # fmt: skip
    return {
        "loss_final": max(m.held_out_loss or float("inf") for m in result.measurements),
        "loss_unigram": entropies.unigram,
        "plans": [m.plan_name for m in result.measurements],
        "held_plan": HELD,
        "held_plan_step_error": abs(step_error) if step_error is not None else None,
        "held_plan_memory_error": abs(memory_error) if memory_error is not None else None,
        "noise_floor": report.noise_floor,
        "loss_spread_first_5_steps": _loss_spread(result, slice(0, 5)),
        "loss_spread_last_20_steps": _mean_spread(result, 20),
        "machine": f"{fingerprint.processor}, {fingerprint.num_cores} cores",
        "date": datetime.now(UTC).date().isoformat(),
        "repeats": min(len(s) for s in steps),
        "spread": max(spreads),
        "wall_s": wall_s,
    }


def _loss_spread(result: RunResult, window: slice) -> float:
    """Returns the largest difference between plans at one step, as a share of the loss."""
    rows: Iterable[tuple[float, ...]] = zip(
        *(m.losses[window] for m in result.measurements), strict=True
    )
    return max((max(row) - min(row)) / min(row) for row in rows)


def _mean_spread(result: RunResult, last: int) -> float:
    """Returns how far the plans' mean losses over the last steps lie apart, as a share."""
    means = [sum(m.losses[-last:]) / len(m.losses[-last:]) for m in result.measurements]
    return (max(means) - min(means)) / min(means)
