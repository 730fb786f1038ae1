"""Export targets by name: one function a target, one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.plan.file import PlanFile
from flopwright.planner.export.accelerate import accelerate_file
from flopwright.planner.export.containers import dstack_file, kubeflow_file, skypilot_file
from flopwright.planner.export.megatron import megatron_file
from flopwright.planner.export.text import TargetFile
from flopwright.planner.export.torchtitan import torchtitan_file
from flopwright.planner.export.verl import verl_file

# Beside the files of every bundle (torchrun, Slurm, DeepSpeed): what is written on request.
TARGETS: Final[dict[str, Callable[[PlanFile, str | None], TargetFile]]] = {
    "accelerate": lambda plan, image: accelerate_file(plan),
    "dstack": dstack_file,
    "kubeflow": kubeflow_file,
    "megatron": lambda plan, image: megatron_file(plan),
    "skypilot": skypilot_file,
    "torchtitan": lambda plan, image: torchtitan_file(plan),
    "verl": lambda plan, image: verl_file(plan),
}


def target_files(
    plan: PlanFile, names: Sequence[str], *, image: str | None = None
) -> tuple[TargetFile, ...]:
    """Returns the files of the named targets, in the order of their names.

    Args:
        image: container image for the targets that start one.

    Raises:
        InputError: unknown names, and everything that the targets cannot express, together.
    """
    found: list[Violation] = []
    files = []
    for name in sorted(set(names)):
        if name not in TARGETS:
            fix = did_you_mean(name, TARGETS)
            rule = "no such export target"
            found.append(Violation(field="target", value=name, rule=rule, nearest_fix=fix))
            continue
        try:
            files.append(TARGETS[name](plan, image))
        except InputError as error:
            found.extend(error.violations)
    if found:
        raise InputError(found)
    return tuple(files)
