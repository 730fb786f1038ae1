"""Memory of published runs: predicted by definition, and scored with the model left out.

The bytes of tensors come from simulator/memory (a stack's habits, no constant fitted). Only
what lies between tensors and a reading is learnt: the allocator's reserve over its peak, and
what a card holds beside the allocator. Each is one number for a definition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from flopwright.errors import InputError
from flopwright.ops import Array
from flopwright.simulator.accuracy.memory_constants import MemoryConstants, shipped_constants
from flopwright.simulator.accuracy.memory_habits import profile_of_run, scenario_of_run
from flopwright.simulator.accuracy.run_of_row import PublishedRun
from flopwright.simulator.accuracy.score import Scored
from flopwright.simulator.memory.stack_memory import StackMemory, stack_memory

# What a definition counts: tensors between steps, or at their peak.
RESIDENT: Final = "resident"
EXACT: Final = ("allocated", RESIDENT)
# Definitions that lie above the allocated peak by a factor; "smi" lies above it by bytes too.
FACTORS: Final = ("reserved", "callback")
# Nothing says what was read: taken as the peak of tensors, which frameworks print.
UNKNOWN: Final = "unknown"
DEVICE: Final = "smi"
# Runs with one of these are reported apart: their plan, length or value is not the run's own.
APART: Final = frozenset({"own-plan", "no-seq", "odd"})
# Numbers of memory profiles that were told by published peaks: kempnerforge's width.
READ_OFF: Final = 1
# The caching allocator's reserve over its peak where nothing taught it: blocks are cut from
# segments of 2 and 20 MiB, and some of them stay in pieces. An assumption.
RESERVE: Final = 1.03
# Spread of a definition that no other model was measured by, as a log standard deviation.
_UNKNOWN_SPREAD: Final = 0.15
_SAFE_QUANTILE: Final = 0.75
_LEAST_SPREAD: Final = 0.03
_NORMAL_80: Final = 1.2816


def _stage(run: PublishedRun, bytes_by_stage: Array) -> float:
    """Returns the bytes of the rank that was read; by default of the fullest."""
    said = run.notes.lower()
    if "last rank" in said:
        return float(bytes_by_stage[-1])
    if re.search(r"rank.0 ", said):
        return float(bytes_by_stage[0])
    return float(bytes_by_stage.max())


@dataclass(frozen=True, slots=True)
class RunBytes:
    """A run's bytes before anything fitted.

    Attributes:
        beside: what its GPU's file assumes kept; `groups`: groups of ranks, the context as one;
            `card`: all that the GPU has.
    """

    allocated: float
    resident: float
    held: float
    beside: float
    groups: int
    card: float


def run_bytes(run: PublishedRun) -> RunBytes:
    """Returns what the tensors of a run take.

    Raises:
        InputError: a plan that the memory model cannot lay out.
    """
    plan = run.plan
    profile, gpu = profile_of_run(run), run.scenario.cluster.node.gpu
    memory: StackMemory = stack_memory(scenario_of_run(run, profile), plan, profile)
    return RunBytes(
        allocated=_stage(run, memory.allocated),
        resident=_stage(run, memory.resident),
        held=_stage(run, memory.held),
        beside=float(gpu.reserved_bytes),
        card=float(gpu.hbm_bytes),
        groups=2 + sum(n > 1 for n in (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep)),
    )


def run_bytes_of(
    runs: Iterable[PublishedRun],
) -> tuple[dict[str, RunBytes], tuple[tuple[str, str], ...]]:
    """Returns the bytes of runs by id, and the ids of those that have none, with the reason."""
    found, failed = {}, []
    for run in runs:
        try:
            found[run.id] = run_bytes(run)
        except (InputError, ArithmeticError, ValueError) as error:
            failed.append((run.id, " ".join(str(error).split())))
    return found, tuple(failed)


def by_definition(found: RunBytes, constants: MemoryConstants) -> dict[str, float]:
    """Returns bytes under every definition; a run that was measured fitted its card."""
    out = {"allocated": found.allocated, RESIDENT: found.resident, UNKNOWN: found.allocated}
    factors = {"reserved": RESERVE, **constants.factors}
    out |= {name: found.held * factors.get(name, 1.0) for name in FACTORS}
    each = constants.group_bytes
    out[DEVICE] = out["reserved"] + (found.beside if each is None else each * found.groups)
    return {name: min(nbytes, found.card) for name, nbytes in out.items()}


def predicted_memory(
    run: PublishedRun, constants: MemoryConstants | None = None
) -> dict[str, float]:
    """Returns a run's predicted bytes by definition (rows.memory_by_definition).

    Args:
        constants: None takes the committed ones.
    """
    return by_definition(run_bytes(run), constants or shipped_constants())


def fit_constants(runs: Iterable[PublishedRun], found: Mapping[str, RunBytes]) -> MemoryConstants:
    """Returns the constants of measured runs: medians over models of each model's quantile.

    What a card holds beside the allocator is the upper quartile of the models' medians: a peak
    predicted too low costs a run, one too high a little room.
    """
    mine = [r for r in runs if r.id in found and not r.flags & APART]
    factors = {}
    for name in FACTORS:
        value = _typical(mine, name, lambda measured, r: measured / found[r.id].held)
        if value is not None:
            factors[name] = value
    reserve = factors.get("reserved", RESERVE)
    each = _typical(
        mine,
        DEVICE,
        lambda measured, r: max(measured - reserve * found[r.id].held, 0.0) / found[r.id].groups,
        quantile=_SAFE_QUANTILE,
    )
    constants = MemoryConstants(factors=factors, group_bytes=each)
    return constants.model_copy(update={"log_std": _spreads(mine, found, constants)})


def _typical(
    runs: Sequence[PublishedRun],
    name: str,
    value: Callable[[float, PublishedRun], float],
    quantile: float = 0.5,
) -> float | None:
    by_model: dict[str, list[float]] = {}
    for run in runs:
        if name in run.memory:
            by_model.setdefault(run.model_name, []).append(value(run.memory[name], run))
    if not by_model:
        return None
    return float(np.quantile([np.median(v) for v in by_model.values()], quantile))


def _spreads(
    runs: Sequence[PublishedRun], found: Mapping[str, RunBytes], constants: MemoryConstants
) -> dict[str, float]:
    """Returns by definition the spread that would hold 80 % of the runs."""
    logs: dict[str, list[float]] = {}
    for run in runs:
        predicted = by_definition(found[run.id], constants)
        for name, measured in run.memory.items():
            if name in predicted:
                logs.setdefault(name, []).append(abs(np.log(measured / predicted[name])))
    return {
        name: max(float(np.quantile(v, 0.8)) / _NORMAL_80, _LEAST_SPREAD)
        for name, v in logs.items()
    }


@dataclass(frozen=True, slots=True)
class MemoryScores:
    """Predicted and measured peaks.

    Attributes:
        apart: of runs whose plan, length or value is not their own.
        failed: runs that gave none, with the reason.
        free_parameters: numbers that were fitted.
    """

    runs: tuple[Scored, ...]
    apart: tuple[Scored, ...] = ()
    failed: tuple[tuple[str, str], ...] = field(default=())
    free_parameters: int = 0


def memory_scores(
    published: Sequence[PublishedRun], *, leave_model_out: bool = True
) -> MemoryScores:
    """Returns every run with a measured memory, one score a definition.

    Args:
        leave_model_out: constants are fitted to the runs of other models; False takes the
            committed ones.
    """
    known = {*EXACT, *FACTORS, DEVICE, UNKNOWN}
    runs = [r for r in published if known & r.memory.keys()]
    found, failed = run_bytes_of(runs)
    out, folds = [], dict[str, MemoryConstants]()
    whole = fit_constants(runs, found) if leave_model_out else shipped_constants()
    for run in runs:
        if run.id not in found:
            continue
        constants = whole
        if leave_model_out:
            others = (r for r in runs if r.model_name != run.model_name)
            if run.model_name not in folds:
                folds[run.model_name] = fit_constants(others, found)
            constants = folds[run.model_name]
        predicted = by_definition(found[run.id], constants)
        out += [
            scored_memory(run, name, predicted[name], constants)
            for name in run.memory
            if name in predicted
        ]
    return MemoryScores(
        runs=tuple(r for r in out if not r.labels["apart"]),
        apart=tuple(r for r in out if r.labels["apart"]),
        failed=failed,
        free_parameters=whole.free_parameters + READ_OFF,
    )


def scored_memory(
    run: PublishedRun, definition: str, predicted: float, constants: MemoryConstants
) -> Scored:
    """Returns one definition of a run, predicted and measured."""
    spread = np.exp(_NORMAL_80 * constants.log_std.get(definition, _UNKNOWN_SPREAD))
    return Scored(
        id=run.id,
        measured=run.memory[definition],
        predicted=predicted,
        low=predicted / spread,
        high=predicted * spread,
        labels={
            "definition": definition,
            "source": run.source,
            "gpu": run.gpu,
            "model": run.model_name,
            "family": run.stack.family,
            "stack": run.stack.label(),
            "framework": run.stack.framework,
            "apart": ", ".join(sorted(run.flags & APART)),
        },
        cell=run.cell,
        sweep="",
        assumed=run.assumed,
    )
