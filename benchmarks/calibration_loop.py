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
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from calibration_figures import TWIN, report_of, summary, verdicts

from flopwright.executor.launch.commands import rank_environment, torchrun_command
from flopwright.executor.launch.request import (
    PROBE_FILE,
    REQUEST_FILE,
    STOP_FILE,
    RunEntry,
    RunRequest,
    measurement_file,
    write_json,
)
from flopwright.executor.measure.fingerprint import processor_name
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.metrics import Measurement
from flopwright.report.probe import ProbeReport
from flopwright.spec.load import load_scenario, make_plan_file
from flopwright.spec.scenario import Scenario
from flopwright.spec.yaml_lines import read_yaml

SCENARIOS: Final = {"k2": "kimi_k2_mini_2cpu_fp32", "llama": "llama_mini_2cpu_fp32"}
_DOCUMENT: Final = read_yaml(Path(__file__).parent / "calibration_plans.yaml")
PLANS: Final[dict[int, dict[str, dict[str, dict[str, Any]]]]] = {
    int(world): models for world, models in _DOCUMENT.data.items()
}
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


def _figures(world: int, folder: Path, draws: int) -> dict[str, Any]:
    probe, runs = read_launch(folder)
    return report_of(probe, runs, entries(world)[1], folder=folder, draws=draws)


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
        found = {w: _figures(w, out / str(w), parsed.draws) for w in parsed.worlds}
    result = summary(found)
    for world, report in found.items():
        for line in verdicts(world, report):
            sys.stdout.write(line + "\n")
        if parsed.save:
            RESULTS.mkdir(exist_ok=True)
            name = f"calibration_loop_{world}_ranks_{report['date'][:10]}.json"
            write_json(RESULTS / name, {"machine": processor_name(), **report})
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
