"""How far predictions are off before and after learning from five plans; a JSON object last.

Small models of the shapes of Kimi K2 and Llama train under many plans
(calibration_plans.yaml), all plans of a world size inside one launch, in turns, the probe in
the same launch. Every plan is then predicted from the probe alone (operators, collectives,
reference steps of two layers under data parallelism), and those that were not among the five
from the calibration learnt from these five. The five are marked before anything runs; what
other, random draws of five give is in `draws`. `memory_max_error` is over plans and memory
classes, predicted before the run with even routing; `memory_max_error_given_routing` is the same
predicted from the rows that experts got in the run (nobody knows them before), and
`memory_max_error_even` leaves out plans with expert parallelism,
whose fullest rank holds more tokens than the mean.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from flopwright.executor.launch.commands import rank_environment, torchrun_command
from flopwright.executor.launch.request import (
    PROBE_FILE,
    REQUEST_FILE,
    ROUNDS_FILE,
    STOP_FILE,
    RunEntry,
    RunRequest,
    measurement_file,
    write_json,
)
from flopwright.executor.measure.fingerprint import processor_name
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.compare import ClassComparison, Comparison, compare, memory_comparisons
from flopwright.report.metrics import Measurement
from flopwright.report.probe import ProbeReport
from flopwright.simulator.calibration.fit_probe import fit_probe
from flopwright.simulator.calibration.fit_runs import fit_runs
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.calibration.repredict import memory_as_routed, predict_measurement
from flopwright.spec.load import load_scenario, make_plan_file
from flopwright.spec.scenario import Scenario
from flopwright.spec.yaml_lines import read_yaml

SCENARIOS: Final = {"k2": "kimi_k2_mini_2cpu_fp32", "llama": "llama_mini_2cpu_fp32"}
_DOCUMENT: Final = read_yaml(Path(__file__).parent / "calibration_plans.yaml")
PLANS: Final[dict[int, dict[str, dict[str, dict[str, Any]]]]] = {
    int(world): models for world, models in _DOCUMENT.data.items()
}
TWIN: Final = "-again"
_ROUND_STEPS: Final = 2
# A round, the held-out losses and the checkpoints take about as long as this.
_ENDING_S: Final = 75.0
RESULTS: Final = Path(__file__).parent / "results"


def scenario_of(model: str, world: int) -> Scenario:
    """Returns what a model trains on, `world` ranks of this machine's cores."""
    mini = load_scenario(SCENARIOS[model])
    cores = len(os.sched_getaffinity(0))
    node = mini.cluster.node.model_copy(update={"gpus": world, "cores": cores})
    cluster = mini.cluster.model_copy(update={"name": f"local_{world}x", "node": node})
    return mini.model_copy(update={"cluster": cluster, "name": f"{model}_{world}"})


def entries(world: int, only: int | None = None) -> tuple[tuple[RunEntry, ...], frozenset[str]]:
    """Returns the plans of a world size, the first of each model twice, and those learnt from.

    Args:
        only: so many of each model (a rehearsal); None: all.
    """
    out, learnt = [], set()
    for model, plans in PLANS[world].items():
        scenario = scenario_of(model, world)
        chosen = list(plans.items())[:only]
        for place, (marked, fields) in enumerate(chosen):
            name = f"{model}-{marked.rstrip('*')}"
            if marked.endswith("*"):
                learnt.add(name)
            file = make_plan_file(scenario, ParallelPlan(**fields), name)
            out.append(RunEntry(name=name, plan=file))
            if place == 0:
                out.append(RunEntry(name=name + TWIN, plan=file))
    return tuple(out), frozenset(learnt)


def run_launch(world: int, folder: Path, parsed: argparse.Namespace) -> None:
    """Runs all plans of a world size in turns in one launch, after the probe.

    Once the minutes are nearly up it ends after the round it is in.
    """
    found, _ = entries(world, parsed.only)
    request = RunRequest(
        entries=found,
        device="cpu",
        steps=parsed.steps,
        steps_per_round=_ROUND_STEPS,
        probe=True,
        probe_budget_s=parsed.budget,
        held_out_sequences=4,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / REQUEST_FILE, request.to_data())
    command = torchrun_command(
        folder / REQUEST_FILE, nproc_per_node=world, log_dir=folder / "logs"
    )
    began = time.monotonic()
    with subprocess.Popen(command, env=rank_environment(os.environ, "cpu")) as process:
        while process.poll() is None:
            if time.monotonic() - began > 60 * parsed.minutes - _ENDING_S:
                (folder / STOP_FILE).touch()
            time.sleep(1.0)
    if process.returncode:
        raise SystemExit(f"the launch of {world} ranks ended with code {process.returncode}")


def read_launch(folder: Path) -> tuple[ProbeReport, list[Measurement]]:
    """Returns what a launch left behind."""
    request = RunRequest.model_validate_json((folder / REQUEST_FILE).read_bytes())
    found = [
        Measurement.model_validate_json((folder / measurement_file(e.name)).read_bytes())
        for e in request.entries
    ]
    return ProbeReport.model_validate_json((folder / PROBE_FILE).read_bytes()), found


def compared(calibration: Calibration, runs: Sequence[Measurement]) -> dict[str, Comparison]:
    """Returns every run beside what the calibration predicts for it."""
    return {m.plan_name: compare(predict_measurement(calibration, m), m) for m in runs}


def step_error(comparison: Comparison) -> float:
    """Returns the signed error of the step time."""
    error = comparison.error("step_time_s")
    assert error is not None
    return error


def covered(comparisons: Mapping[str, Comparison], names: Sequence[str]) -> float:
    """Returns the share of runs inside their intervals."""
    return statistics.mean(float(bool(comparisons[n].metrics[0].in_interval)) for n in names)


def memory_errors(classes: Sequence[ClassComparison]) -> dict[str, float]:
    """Returns |predicted / measured - 1| by memory class of the fullest stage."""
    return {
        c.name: abs(c.predicted / c.measured - 1) if c.measured else float(c.predicted > 0)
        for c in classes
    }


def routed_memory(
    calibration: Calibration, measurement: Measurement
) -> tuple[ClassComparison, ...]:
    """Returns the memory classes, predicted from the rows that experts got in the run."""
    stages = memory_as_routed(calibration, measurement)
    return memory_comparisons(stages, measurement.metrics)


def report_of(world: int, folder: Path, draws: int) -> dict[str, Any]:
    """Returns a world size's figures."""
    probe, runs = read_launch(folder)
    _, marked = entries(world)
    plans = [m for m in runs if not m.plan_name.endswith(TWIN)]
    names = [m.plan_name for m in plans]
    base = fit_probe(probe)
    before = compared(base, plans)
    learnt = [m for m in plans if m.plan_name in marked]
    after = compared(fit_runs(base, learnt, predict_measurement), plans)
    held = [n for n in names if n not in marked]
    memory = {n: memory_errors(before[n].memory_classes) for n in names}
    routed = {m.plan_name: memory_errors(routed_memory(base, m)) for m in plans}
    floor = runs[0].noise_floor
    return {
        "probe_only_median_error": _median_error(before, names),
        "calibrated_median_error": _median_error(after, held),
        "interval80_coverage": covered(after, held),
        "probe_only_coverage": covered(before, names),
        "memory_max_error": _largest(memory, names),
        "memory_max_error_given_routing": _largest(routed, names),
        "memory_max_error_even": _largest(memory, [n for n in names if "ep" not in _kinds(n)]),
        "noise_floor": floor,
        "date": probe.created,
        "repeats": min(len(m.step_time_samples_s) for m in plans),
        "sentinel_spread": _sentinel_spread(folder),
        "n_plans": len(plans),
        "n_held_out": len(held),
        "learnt_from": sorted(m.plan_name for m in learnt),
        "draws": dict(_draws(base, plans, draws)),
        "by_model": {
            model: {
                "probe_only_median_error": _median_error(before, _of(model, names)),
                "calibrated_median_error": _median_error(after, _of(model, held)),
            }
            for model in PLANS[world]
            if _of(model, held)
        },
        "plans": {
            m.plan_name: {
                "step_time_s": m.metrics.step_time_s,
                "spread": m.step_time_p90_s / m.step_time_p10_s - 1,
                "probe_only_error": step_error(before[m.plan_name]),
                "calibrated_error": step_error(after[m.plan_name]),
                "inside": after[m.plan_name].metrics[0].in_interval,
                "memory_error": max(memory[m.plan_name].values(), default=0.0),
                "memory_error_given_routing": max(routed[m.plan_name].values(), default=0.0),
                "expert_rows": max(m.expert_rows, default=1.0),
            }
            for m in plans
        },
    }


def _sentinel_spread(folder: Path) -> float:
    """Returns how much one block of products, timed each round, varied: slowest / quickest - 1."""
    lines = (folder / ROUNDS_FILE).read_text(encoding="utf-8").splitlines()
    seconds = [json.loads(line)["sentinel_s"] for line in lines]
    return max(seconds) / min(seconds) - 1


def _kinds(name: str) -> set[str]:
    """Returns the kinds of parallelism that a plan's name says: "k2-pp2-ep2-mb2" has pp and ep."""
    return {part.rstrip("0123456789") for part in name.split("-")}


def _largest(errors: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> float:
    return max((e for n in names for e in errors[n].values()), default=0.0)


def _of(model: str, names: Sequence[str]) -> list[str]:
    return [n for n in names if n.startswith(model)]


def _median_error(comparisons: Mapping[str, Comparison], names: Sequence[str]) -> float:
    return statistics.median(abs(step_error(comparisons[n])) for n in names)


def _draws(
    base: Calibration, plans: Sequence[Measurement], draws: int
) -> Iterator[tuple[str, float]]:
    """Yields what other draws of five plans give for the rest: median, worst, coverage."""
    if not draws:
        return
    generator = np.random.default_rng(0)
    errors, shares = [], []
    for _ in range(draws):
        chosen = set(generator.choice(len(plans), 5, replace=False).tolist())
        learnt = fit_runs(base, [plans[i] for i in sorted(chosen)], predict_measurement)
        held = [m for i, m in enumerate(plans) if i not in chosen]
        found = compared(learnt, held)
        errors.append(_median_error(found, list(found)))
        shares.append(covered(found, list(found)))
    yield "number", draws
    yield "median_error", statistics.median(errors)
    yield "p90_error", float(np.quantile(errors, 0.9))
    yield "coverage", statistics.mean(shares)


def main() -> None:
    """Runs the launches that are asked for and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], choices=list(PLANS))
    parser.add_argument("--steps", type=int, default=12, help="of each plan, at most")
    parser.add_argument("--minutes", type=float, default=5.3, help="for a launch, about")
    parser.add_argument("--budget", type=float, default=75.0, help="seconds of probing")
    parser.add_argument("--only", type=int, help="so many plans of each model")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/ too")
    parser.add_argument("--out", type=Path, help="keep the launches' folders here")
    parser.add_argument("--again", action="store_true", help="read --out, run nothing")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = parsed.out or Path(scratch)
        if not parsed.again:
            for world in parsed.worlds:
                run_launch(world, out / str(world), parsed)
        found = {w: report_of(w, out / str(w), parsed.draws) for w in parsed.worlds}
    result = summary(found)
    for world, report in found.items():
        for line in verdicts(world, report):
            sys.stdout.write(line + "\n")
        if parsed.save:
            RESULTS.mkdir(exist_ok=True)
            name = f"calibration_loop_{world}_ranks_{report['date'][:10]}.json"
            write_json(RESULTS / name, {"machine": processor_name(), **report})
    sys.stdout.write(json.dumps(result) + "\n")


def verdicts(world: int, report: Mapping[str, Any]) -> list[str]:
    """Returns a line for each thing that was asked for: met or not, and the figures."""
    floor = report["noise_floor"] or 0.0
    bound = max(0.10, 2 * floor) if world == 2 else 0.20
    why = f"twice the noise floor of {floor:.1%}" if bound > 0.10 and world == 2 else "asked for"
    lines = [
        ("probe alone, median step error", report["probe_only_median_error"], 0.20, "asked for"),
        ("learnt from five, median error of the others", report["calibrated_median_error"],
         bound, why),
        ("tensor memory by class given the rows that experts got, largest error",
         report["memory_max_error_given_routing"], 0.01, "asked for"),
        ("the same before the run, with even routing", report["memory_max_error"], 0.01,
         "asked for"),
        ("the same without expert parallelism", report["memory_max_error_even"], 0.01,
         "asked for"),
    ]  # fmt: skip
    out = [
        f"{world} ranks: {'met' if value <= limit else 'NOT MET'}: {what} {value:.2%}, "
        f"at most {limit:.1%} ({reason})"
        for what, value, limit, reason in lines
    ]
    share = report["interval80_coverage"]
    word = "met" if 0.65 <= share <= 0.95 else "NOT MET"
    out.append(f"{world} ranks: {word}: 80 % intervals hold {share:.0%} of {report['n_held_out']}")
    return out


def summary(found: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns the last line: the figures of the first world size, and all by world size."""
    first = next(iter(found.values()))
    keys = (
        "probe_only_median_error", "calibrated_median_error", "interval80_coverage",
        "memory_max_error", "noise_floor", "n_plans",
    )  # fmt: skip
    return {
        **{key: first[key] for key in keys},
        "by_world_size": {str(w): report for w, report in found.items()},
        "machine": processor_name(),
        "date": first["date"],
        "repeats": first["repeats"],
        "spread": statistics.median(p["spread"] for p in first["plans"].values()),
    }


if __name__ == "__main__":
    main()
