"""The dry run of `flopwright run --dry`: roles in processes of their own, and what they show."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flopwright.errors import InputError, Violation

if TYPE_CHECKING:
    from flopwright.executor.dry.compare import Difference
    from flopwright.executor.dry.roles import Role
    from flopwright.plan.file import PlanFile

ALL_ROLES = "all-roles"
_SHOWN_DIFFERENCES = 20


@dataclass(frozen=True, slots=True)
class RoleResult:
    """A rank's step as recorded and as predicted, and where they differ.

    Attributes:
        whole: whether all micro-batches of the step were run.
        recorded, predicted: without their lists, which are compared where they are made.
    """

    rank: int
    stage: int
    whole: bool
    seconds: float
    recorded: dict[str, Any]
    predicted: dict[str, Any]
    differences: tuple[Difference, ...]

    def to_data(self) -> dict[str, Any]:
        """Returns plain data."""
        return {
            "rank": self.rank,
            "stage": self.stage,
            "whole_step": self.whole,
            "seconds": round(self.seconds, 2),
            "recorded": self.recorded,
            "predicted": self.predicted,
            "differences": [d.to_data() for d in self.differences],
        }


def dry_run(path: Path, rank: str, *, quiet: bool) -> tuple[PlanFile, list[RoleResult]]:
    """Returns the plan and the result of the asked rank, or of every role.

    Args:
        rank: a rank's number, or ALL_ROLES.
        quiet: show no progress.

    Raises:
        InputError: the plan breaks a rule, this executor does not run it, or it has no such
            rank.
    """
    from flopwright.executor.dry.roles import Role, roles
    from flopwright.executor.launch.supported import unsupported
    from flopwright.plan.parallel import plan_violations
    from flopwright.simulator.training.step_calls import unlisted
    from flopwright.spec.load import load_plan

    plan = load_plan(path)
    broken = [*plan_violations(plan.parallel, plan.scenario), *unsupported(plan)]
    broken = broken or unlisted(plan.scenario, plan.parallel)
    packing = plan.scenario.workload.packing
    if packing is not None and packing.lengths:
        rule = "a dry step has whole rows, whose attention is not that of documents"
        fix = "make a plan without lengths (packing: {})"
        broken.append(Violation(field="workload.packing.lengths", rule=rule, nearest_fix=fix))
    if broken:
        raise InputError(broken)
    asked = roles(plan.parallel) if rank == ALL_ROLES else (Role(_number(rank, plan), True),)
    if len(asked) == 1:
        return plan, [check_role(plan, asked[0])]
    results = []
    for result in _in_processes(plan, asked):
        results.append(result)
        if not quiet:
            verdict = "differs" if result.differences else "equal"
            progress = f"[{len(results)}/{len(asked)}]"
            typer.echo(f"{progress} rank {result.rank}, stage {result.stage}: {verdict}", err=True)
    return plan, sorted(results, key=lambda r: r.rank)


def _number(rank: str, plan: PlanFile) -> int:
    size = plan.parallel.world_size
    if rank.isdecimal() and int(rank) < size:
        return int(rank)
    raise InputError(
        Violation(
            field="--rank",
            value=rank,
            rule=f"the plan has ranks 0 to {size - 1}",
            nearest_fix=f"give one of them, or {ALL_ROLES}",
        )
    )


def _in_processes(plan: PlanFile, asked: Sequence[Role]) -> Iterator[RoleResult]:
    """Yields results as they come; a process holds one rank at a time."""
    workers = min(len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1, len(asked))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(check_role, plan, role) for role in asked]):
            yield future.result()


def check_role(plan: PlanFile, role: Role) -> RoleResult:
    """Runs one rank's step dry and compares it with the prediction; runs in any process."""
    from flopwright.executor.dry.compare import compare
    from flopwright.executor.dry.roles import shortened
    from flopwright.executor.dry.step import dry_step
    from flopwright.simulator.training.rank_step import rank_step

    began = time.perf_counter()
    asked = plan if role.whole else shortened(plan)
    recorded = dry_step(asked, role.rank)
    predicted = rank_step(asked.scenario, asked.parallel, role.rank)
    return RoleResult(
        rank=role.rank,
        stage=recorded.stage,
        whole=role.whole,
        seconds=time.perf_counter() - began,
        recorded=recorded.to_data(),
        predicted=predicted.to_data(),
        differences=compare(predicted, recorded, whole=role.whole),
    )


def report(plan: PlanFile, results: Sequence[RoleResult], say: Callable[[str], None]) -> None:
    """Says what was run and every difference, as text."""
    from rich.console import Console
    from rich.table import Table

    from flopwright.units import show_bytes

    table = Table(title=f"dry run of {plan.name}: {plan.parallel.label()}")
    for column in ("stage", "ranks", "actions", "messages", "peak recorded", "predicted", ""):
        table.add_column(column, justify="right")
    for group in _alike(results):
        first = group[0]
        calls = sum(t["calls"] for t in first.recorded["traffic"].values())
        different = sum(bool(r.differences) for r in group)
        table.add_row(
            str(first.stage),
            str(len(group)),
            str(first.recorded["actions"]),
            str(int(calls)),
            show_bytes(first.recorded["peak_bytes"]),
            show_bytes(first.predicted["peak_bytes"]),
            f"{different} differ" if different else "equal",
        )
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    apart = [r for r in results if r.differences]
    for result in apart[:_SHOWN_DIFFERENCES]:
        say(f"rank {result.rank} (stage {result.stage}):")
        for d in result.differences:
            say(f"  {d.field}: predicted {d.predicted}, recorded {d.recorded}")
    if len(apart) > _SHOWN_DIFFERENCES:
        say(f"and {len(apart) - _SHOWN_DIFFERENCES} more ranks that differ")


def _alike(results: Sequence[RoleResult]) -> list[list[RoleResult]]:
    """Returns the results by stage and length of the step, in the order of ranks."""
    found: dict[tuple[int, bool], list[RoleResult]] = {}
    for result in results:
        found.setdefault((result.stage, not result.whole), []).append(result)
    return [found[key] for key in sorted(found)]
