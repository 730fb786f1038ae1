"""A whole run, phase by phase: each under its own plan, from the state that the last one left.

A phase is an ordinary run in a folder of its own, `OUT/1-pretrain`, `OUT/2-anneal`, ...; what
it begins with is the last checkpoint of the phase before, resharded to its plan. Its learning
rate counts from its start, and its data is shuffled anew. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.executor.checkpoint.manifest import find_checkpoint
from flopwright.executor.launch.checks import LaunchOptions, check_request
from flopwright.executor.launch.local import RunResult, launch
from flopwright.executor.launch.machine import find_machine
from flopwright.executor.launch.progress import Progress
from flopwright.plan.file import PlanFile
from flopwright.plan.phases import RunPlan, load_run_plan, plan_of_phase
from flopwright.spec.load import dump_yaml
from flopwright.spec.yaml_lines import read_yaml

PLAN_FILE: Final = "plan.yaml"
Launch = Callable[[Sequence[str | Path], str | Path, LaunchOptions, Progress | None], RunResult]


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """A phase by name and what its run left."""

    name: str
    result: RunResult


def is_run_plan(path: Path) -> bool:
    """Whether a file is the plan of a whole run, and not of one step.

    Raises:
        InputError: the file cannot be read.
    """
    data = read_yaml(path).data
    return isinstance(data, dict) and "phases" in data


def phase_folder(out_dir: Path, index: int, name: str) -> Path:
    """Returns the folder of a phase (0-based) in a run's folder."""
    return out_dir / f"{index + 1}-{name}"


def launch_phases(
    path: Path,
    out_dir: Path,
    options: LaunchOptions,
    on_progress: Progress | None = None,
    launch_one: Launch = launch,
) -> tuple[PhaseResult, ...]:
    """Runs the phases of a run's plan in order and returns what each of them showed.

    With `options.resume` phases that are done are read, and the one that was under way goes on.

    Args:
        path: a plan of a whole run (flopwright.plan.phases.RunPlan).
        out_dir: a new or empty folder, one with this run to resume.
        options: as for one run; steps follow from the phases' tokens.

    Raises:
        InputError: something stands against one of the phases; nothing has been started then.
        RunFailedError: a rank failed; the phases before it stand.
    """
    run = load_run_plan(path)
    plans = [plan_of_phase(run, phase.name) for phase in run.phases]
    _check(run, plans, out_dir, options)
    results: list[PhaseResult] = []
    for index, (phase, plan) in enumerate(zip(run.phases, plans, strict=True)):
        folder = phase_folder(out_dir, index, phase.name)
        own = _own_options(options, plan, index, phase.name)
        if results:
            before = results[-1].result
            own = replace(own, start_from=find_checkpoint(before.checkpoints[results[-1].name]))
        plan_file = out_dir / f"{folder.name}-{PLAN_FILE}"
        out_dir.mkdir(parents=True, exist_ok=True)
        plan_file.write_text(dump_yaml(plan), encoding="utf-8")
        show = on_progress or (lambda _: None)
        show({"phase": f"phase {folder.name}", "share": 0.0})
        results.append(PhaseResult(phase.name, launch_one([plan_file], folder, own, on_progress)))
        if results[-1].result.stopped_early:
            break
    return tuple(results)


def _own_options(options: LaunchOptions, plan: PlanFile, index: int, name: str) -> LaunchOptions:
    seed = plan.scenario.workload.seed if options.seed is None else options.seed
    world = plan.parallel.world_size
    return replace(
        options,
        names=(name,),
        seed=seed + index,  # of the order of the data; weights come from the phase before
        nproc=None if options.nproc is None else world,
        checkpoints=True,
    )


def _check(run: RunPlan, plans: Sequence[PlanFile], out_dir: Path, options: LaunchOptions) -> None:
    """Refuses the run where any of its phases could not start."""
    found: list[Violation] = []
    if options.steps is not None:
        rule = "the steps of a run of phases follow from the phases' tokens"
        fix = "leave it out, or plan one phase (flopwright plan --phase)"
        found.append(Violation(field="--steps", value=str(options.steps), rule=rule,
                               nearest_fix=fix))  # fmt: skip
    if out_dir.exists() and any(out_dir.iterdir()) and not options.resume:
        rule, fix = "is not an empty folder", "choose another folder, or go on with --resume"
        found.append(Violation(field="--out", value=str(out_dir), rule=rule, nearest_fix=fix))
    for index, (phase, plan) in enumerate(zip(run.phases, plans, strict=True)):
        own = _own_options(replace(options, steps=None), plan, index, phase.name)
        try:
            check_request([plan], None, own, find_machine())
        except InputError as error:
            found += [_of_phase(v, phase.name) for v in error.violations]
    if found:
        raise InputError(found)


def _of_phase(violation: Violation, name: str) -> Violation:
    data: dict[str, Any] = violation.as_dict()
    return replace(violation, field=f"phase {name}: {data.get('field', '')}")
