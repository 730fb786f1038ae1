"""Measures a machine: rates of the model's ops, memory, collectives, the cost of a call.

Run in the process group of a training launch, or alone. All ranks run every point at the
same time, so that what they share (cores, memory, links) is shared as in training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch

from flopwright.executor.measure.fingerprint import fingerprint
from flopwright.executor.measure.probe_cases import ProbeCase
from flopwright.executor.measure.probe_collectives import SIZES, collective_units
from flopwright.executor.measure.probe_links import link_points, rank_speeds, ranks_per_node
from flopwright.executor.measure.probe_operators import (
    OPTIMIZER_NUMEL,
    case_part,
    host_floor,
    optimizer_part,
    shape_text,
)
from flopwright.executor.measure.probe_overlap import overlap_units
from flopwright.executor.measure.probe_storage import storage_points
from flopwright.executor.measure.probe_timing import Clock, Ranks
from flopwright.executor.measure.probe_units import Journal, Say, Unit, run_units
from flopwright.plan.file import PlanFile
from flopwright.report.metrics import Fingerprint
from flopwright.report.probe import ProbePart, ProbeReport

# Shares of the time budget.
_COLLECTIVE_SHARE: Final = 0.32
_OVERLAP_SHARE: Final = 0.03
_OPTIMIZER_SHARE: Final = 0.05
_STEP_SHARE: Final = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """What a probe may take and where it keeps what it has found.

    Attributes:
        budget_s: seconds to spend, which decides the repeats; reference steps get a share.
        journal: file of finished units; a probe that was ended goes on from it.
        storage: folder whose disk is measured; None leaves it out.
        collective_sizes: payloads in bytes.
    """

    budget_s: float = 60.0
    journal: Path | None = None
    storage: Path | None = None
    collective_sizes: tuple[int, ...] = SIZES


def run_probe(
    device: torch.device,
    plans: Sequence[PlanFile] = (),
    *,
    budget_s: float = 60.0,
    progress: Say | None = None,
    options: ProbeOptions | None = None,
) -> ProbeReport:
    """Returns what this machine does; every rank of the process group calls it together.

    Args:
        device: this rank's device.
        plans: the shapes their models need are measured; a grid that spans the rest always.
        budget_s: seconds to spend, where `options` does not say.
        progress: called on rank 0 with "3/40 what comes next".
        options: see `ProbeOptions`.
    """
    from flopwright.executor.measure.probe_points import cases_for
    from flopwright.executor.measure.probe_reference import probe_steps, reference_plans

    options = options or ProbeOptions(budget_s=budget_s)
    ranks = Ranks(device)
    where = fingerprint(ranks.size, device.type)
    memory = _device_memory(device) or where.memory_bytes // ranks.size
    references = reference_plans(plans, ranks.size, memory) if ranks.size > 1 else []
    steps_s = options.budget_s * _STEP_SHARE if references else 0.0
    cases = cases_for(plans, device.type)
    units = _Units(ranks, options, options.budget_s - steps_s)
    listed = units.listed(cases)
    if references:
        listed.append(
            Unit(
                "reference steps",
                "reference steps",
                lambda _: ProbePart(steps=tuple(probe_steps(references, ranks, steps_s))),
                share=0.0,
                again=False,
            )
        )
    head = _head(where, plans, listed)
    return _report(listed, units, where, options, progress, Journal(options.journal, head))


def measure_cases(
    cases: Sequence[ProbeCase],
    fingerprint: Fingerprint,
    device: torch.device,
    *,
    budget_s: float = 60.0,
    progress: Say | None = None,
    collective_sizes: tuple[int, ...] = SIZES,
) -> ProbeReport:
    """Returns the report over the given cases; collective, as `run_probe`.

    Args:
        cases: from `probe_points`; those that are not essential are left out once the
            budget is spent, the others are run three times whatever the budget.
        fingerprint: of this launch; the calibration will be bound to it.
        device: this rank's device.
        budget_s: seconds to spend.
        progress: called on rank 0 with what comes next.
        collective_sizes: payloads in bytes.
    """
    options = ProbeOptions(budget_s=budget_s, collective_sizes=collective_sizes)
    units = _Units(Ranks(device), options, budget_s)
    return _report(units.listed(cases), units, fingerprint, options, progress, Journal(None, ""))


@dataclass(slots=True)
class _Units:
    """Lists a probe's units, with their shares of the time."""

    ranks: Ranks
    options: ProbeOptions
    seconds: float
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.ranks.device)

    def listed(self, cases: Sequence[ProbeCase]) -> list[Unit]:
        """Returns the units in the order they are measured: what is essential first."""
        ranks, clock, numel = self.ranks, self.clock, OPTIMIZER_NUMEL
        collective, beside = (_COLLECTIVE_SHARE, _OVERLAP_SHARE) if ranks.size > 1 else (0.0, 0.0)
        units = [
            Unit("floor", "host floor", lambda _: host_floor(clock, ranks), 0.0, again=False),
            *(
                Unit(f"optimizer {n}", f"optimizer of {n:,} weights", self._optimizer(n),
                     _OPTIMIZER_SHARE / len(numel))
                for n in numel
            ),
        ]  # fmt: skip
        share = (1 - _OPTIMIZER_SHARE) * (1 - collective - beside) / max(len(cases), 1)
        needed = [c for c in cases if c.essential]
        units += [self._case(c, share) for c in needed]
        if ranks.size > 1:
            whole = (1 - _OPTIMIZER_SHARE) * collective
            units += collective_units(ranks, self.options.collective_sizes, whole)
            units += overlap_units(ranks, (1 - _OPTIMIZER_SHARE) * _OVERLAP_SHARE)
            units.append(Unit("links", "links", lambda _: link_points(ranks), 0.0, again=False))
        folder = self.options.storage
        if folder is not None:
            run: Callable[[float], ProbePart] = lambda _: storage_points(folder, ranks)  # noqa: E731
            units.append(Unit("storage", "checkpoint I/O", run, 0.0, again=False))
        return units + [self._case(c, share) for c in cases if not c.essential]

    def _optimizer(self, numel: int) -> Callable[[float], ProbePart]:
        return lambda seconds: optimizer_part(numel, self.clock, self.ranks, seconds)

    def _case(self, case: ProbeCase, share: float) -> Unit:
        text = f"{case.name} {shape_text(case.rows)} {case.dtype}"
        rows = case.rows
        key = f"{text} {rows.batch[0, 0]:g} {rows.read_bytes[0, 0]:g}"
        return Unit(
            key,
            text,
            lambda seconds: case_part(case, self.clock, self.ranks, seconds),
            share,
            essential=case.essential,
            again=case.essential,
        )


def _report(
    units: Sequence[Unit],
    of: _Units,
    where: Fingerprint,
    options: ProbeOptions,
    progress: Say | None,
    journal: Journal,
) -> ProbeReport:
    """Measures the units and returns everything as a report."""
    ranks = of.ranks
    say = progress if progress is not None and ranks.rank == 0 else _silent
    found = run_units(units, ranks, of.seconds, say, journal)
    parts = [found[u.key] for u in units if u.key in found]
    floors = [p.host_floor_s for p in parts if p.host_floor_s is not None]
    logs = [p.rank_log for p in parts if p.rank_log]
    speeds = rank_speeds(ranks, _same_logs(logs, ranks))
    return ProbeReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=where,
        device_memory_bytes=_device_memory(ranks.device),
        host_floor_s=floors[0] if floors else 0.0,
        operators=tuple(o for p in parts for o in p.operators),
        collectives=tuple(c for p in parts for c in p.collectives),
        overlaps=tuple(o for p in parts for o in p.overlaps),
        steps=tuple(s for p in parts for s in p.steps),
        nodes=ranks.size // ranks_per_node(ranks.size),
        storage=tuple(s for p in parts for s in p.storage),
        links=tuple(x for p in parts for x in p.links),
        ranks=speeds if ranks.size > 1 else (),
    )


def _same_logs(logs: Sequence[Sequence[float]], ranks: Ranks) -> list[tuple[float, ...]]:
    """Returns rank 0's logs as far as every rank must know them: whether there are any."""
    if ranks.agree(float(len(logs))) == 0:
        return []
    return [tuple(row) for row in logs] or [(0.0,) * ranks.size]


def _head(where: Fingerprint, plans: Sequence[PlanFile], units: Sequence[Unit]) -> str:
    """Returns the journal's first line: what machine, plans and units it is of."""
    of = [where.stack_id(), *(p.scenario_hash + p.parallel_hash for p in plans)]
    text = json.dumps([of, [u.key for u in units]])
    return "flopwright probe " + hashlib.sha256(text.encode()).hexdigest()[:16]


def _device_memory(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def _silent(_message: str) -> None:
    """Says nothing."""
