"""Software stacks by name, and the one that a scenario is priced with where none is named.

A plan is run by some software: its kernels, overlap and host overhead decide a fifth of the
step. Scored on published runs, predictions with a stack are several times as close as the
GPU's prior alone (docs/accuracy.md), so a GPU scenario is priced under one: the framework and
release that most of those runs used. It is a choice of whose software, not of numbers: a
scenario or `--stack` names another. `other` is software of one's own that was fitted to no
run: it gets what all frameworks have in common, and a wider interval. `prior` is none.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final, Literal

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.simulator.accuracy.fit_stacks import shipped_levels, stack_calibration
from flopwright.simulator.accuracy.stack_of_row import OTHER, StackKey
from flopwright.simulator.calibration.files import default_calibration, load_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.scenario import Scenario

DEFAULT_STACK: Final = "megatron_bridge-25.11"
PRIOR: Final = "prior"
_GRAPHS: Final = "-graphs"


@cache
def stack_names() -> tuple[str, ...]:
    """Returns the names that `scenario_calibration` takes, sorted, "prior" and "other" first."""
    labels = shipped_levels().terms.get("stack", {})
    found = {re.sub(r"-(dense|moe)(-graphs)?(-composed)?$", r"\2", label) for label in labels}
    return (PRIOR, OTHER, *sorted(found))


def scenario_calibration(scenario: Scenario, stack: str | None = None) -> Calibration:
    """Returns what a scenario is priced with: its GPU's prior under a software stack.

    Args:
        stack: one of `stack_names`; None: the scenario's, else DEFAULT_STACK on GPUs and the
            prior alone on CPUs, where no published stack ran.

    Raises:
        InputError: no such stack.
    """
    gpu = scenario.cluster.node.gpu
    name = stack or scenario.stack or (PRIOR if gpu.kind == "cpu" else DEFAULT_STACK)
    if name not in stack_names():
        raise InputError(
            Violation(
                field="stack",
                value=name,
                rule="no such software stack",
                nearest_fix=did_you_mean(name, stack_names()),
            )
        )
    if name == PRIOR:
        return default_calibration(gpu)
    framework, era = OTHER, "undated"
    if name != OTHER:
        framework, _, era = name.removesuffix(_GRAPHS).rpartition("-")
    family: Literal["dense", "moe"] = "moe" if scenario.model.moe is not None else "dense"
    key = StackKey(framework, era, family, graphs=name.endswith(_GRAPHS))
    return stack_calibration(key, gpu, scenario.workload.precision.gemm)


def calibration_by_name(scenario: Scenario, path_or_id: str) -> Calibration:
    """Returns a calibration by path or id; the id may be that of a prior under a stack.

    Raises:
        InputError: neither a file, nor an id that is known, nor one that the scenario's GPU
            and a named stack have together.
    """
    _, plus, label = path_or_id.partition("+")
    if plus and not Path(path_or_id).suffix.endswith(("yaml", "json")):
        stack = re.sub(r"(-undated)?-(dense|moe)(-graphs)?(-composed)?$", r"\3", label)
        if stack in stack_names():
            found = scenario_calibration(scenario, stack)
            if found.id == path_or_id:
                return found
    return load_calibration(path_or_id)
