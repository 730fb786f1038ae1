"""Which ranks of a plan have a step of their own.

What a rank's step depends on is where it stands: its stage decides layers and list, its place
among tensor-, context- and expert-parallel ranks which part of them it holds. Data-parallel
replicas do the same with other tokens. One rank is run for each place. The first of a stage
makes the whole step. The others of the stage have its list and shapes: they make a step of the
fewest micro-batches that the schedule takes, in which everything of theirs occurs.
"""

from __future__ import annotations

from dataclasses import dataclass

from flopwright.plan.file import PlanFile
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.placement import fewest_microbatches, in_rounds

_PLACE = ("pp", "ep", "tp", "cp")


@dataclass(frozen=True, slots=True)
class Role:
    """One rank to run.

    Attributes:
        whole: all micro-batches of the step, else the fewest that the schedule takes.
    """

    rank: int
    whole: bool


def roles(plan: ParallelPlan) -> tuple[Role, ...]:
    """Returns a rank for each different place, those with a whole step first."""
    mesh, found = Mesh(plan), dict[tuple[int, ...], int]()
    replica = plan.world_size // plan.pp // plan.dp_replicate
    for stage in range(plan.pp):
        first = stage * plan.dp_replicate * replica
        for rank in range(first, first + replica):
            at = mesh.coordinates(rank)
            found.setdefault(tuple(at[axis] for axis in _PLACE), rank)
    stages: set[int] = set()
    out = []
    for place, rank in found.items():
        out.append(Role(rank, place[0] not in stages))
        stages.add(place[0])
    return tuple(sorted(out, key=lambda role: not role.whole))


def fewest(plan: ParallelPlan) -> int:
    """Returns the fewest micro-batches that the plan's schedule takes."""
    return (
        plan.pp
        if in_rounds(plan.schedule, plan.vpp)
        else fewest_microbatches(plan.schedule, plan.pp)
    )


def shortened(plan: PlanFile) -> PlanFile:
    """Returns the plan with a batch of the fewest micro-batches."""
    parallel, scenario = plan.parallel, plan.scenario
    batch = fewest(parallel) * parallel.dp * parallel.micro_batch_size
    workload = scenario.workload.model_copy(update={"global_batch_size": batch})
    return plan.model_copy(update={"scenario": scenario.model_copy(update={"workload": workload})})
