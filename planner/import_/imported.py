"""What every import shares: a scenario and a plan, what was assumed, what was not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from flopwright.errors import InputError, Violation
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.model import ModelSpec
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Workload

# Tokens of a run whose configuration does not say for how long it trains.
_DEFAULT_STEPS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """A running job as the planner sees it.

    Attributes:
        assumed: what the configuration does not say, and what was taken instead.
        not_read: settings of the configuration that the plan has no field for.
    """

    scenario: Scenario
    parallel: ParallelPlan
    assumed: tuple[str, ...]
    not_read: tuple[str, ...]


def data_parallel_size(world_size: int, **axes: int) -> int:
    """Returns the data-parallel ranks that are left after the other axes.

    Raises:
        InputError: they do not divide the ranks.
    """
    others = 1
    for size in axes.values():
        others *= size
    if world_size % others:
        names = " * ".join(f"{k} {v}" for k, v in axes.items())
        raise InputError(
            Violation(
                field="gpus",
                value=str(world_size),
                rule=f"must be a multiple of {names} = {others}",
                nearest_fix=f"give --gpus {max(world_size // others, 1) * others}",
            )
        )
    return world_size // others


def assemble(
    name: str,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Mapping[str, Any],
    parallel: Mapping[str, Any],
    *,
    assumed: Sequence[str],
    not_read: Sequence[str],
) -> ImportedRun:
    """Returns the run with its plan checked against the model and the cluster.

    Raises:
        InputError: every value that no workload or plan can have, every broken rule.
    """
    notes, data = list(assumed), dict(workload)
    if "total_tokens" not in data:
        data["total_tokens"] = _DEFAULT_STEPS * data["seq_len"] * data["global_batch_size"]
        notes.append(f"total_tokens: {_DEFAULT_STEPS} steps; the configuration names none")
    try:
        run = Workload.model_validate(data)
        plan = ParallelPlan.model_validate(dict(parallel))
    except ValidationError as error:
        raise InputError(
            [
                Violation(field=".".join(map(str, e["loc"])), value=str(e["input"]), rule=e["msg"])
                for e in error.errors()
            ]
        ) from error
    scenario = Scenario(name=name, model=model, cluster=cluster, workload=run)
    broken = plan_violations(plan, scenario)
    if broken:
        raise InputError(broken)
    return ImportedRun(
        scenario=scenario, parallel=plan, assumed=tuple(notes), not_read=tuple(not_read)
    )
