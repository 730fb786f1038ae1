"""What may be slow in a measured run, and which of it explains the run best.

Suspects: a time class; a kernel class (kernel_suspects.py); a rank's compute; a link, all links
of a rank, all traffic; the whole machine; a memory class, of all stages or of one. What of them
stands out is found in report/causes.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from flopwright.plan.parallel import ParallelPlan
from flopwright.report.causes import (
    LINK_NOISE,
    Cause,
    Seen,
    Suspect,
    class_suspects,
    memory_seen,
    name_causes,
    suspect_where,
    time_sigma,
)
from flopwright.report.findings import listed
from flopwright.report.metrics import LinkTime, Measurement, Prediction
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.comparison.kernel_suspects import comparable_kernels, kernel_suspects
from flopwright.simulator.comparison.parts import (
    COMPUTE,
    Parts,
    predicted_parts,
    stage_of_rank,
)
from flopwright.spec.scenario import Scenario


def causes_of(
    scenario: Scenario,
    plan: ParallelPlan,
    calibration: Calibration,
    prediction: Prediction,
    measurement: Measurement,
) -> tuple[Cause, ...]:
    """Returns what stands out of a measured run, the clearest first."""
    parts = predicted_parts(scenario, plan, calibration)
    view = _View(plan, parts, measurement, _noise(measurement))
    seen = [*view.times(), *view.kernels(), *view.links(), *_memory(prediction, measurement)]
    seen = view.fitting(seen)
    suspects = [
        *view.link_suspects(seen),
        *class_suspects(seen),
        *kernel_suspects(scenario, plan, calibration, parts, seen),
        *view.rank_suspects(seen),
    ]
    return name_causes(seen, [s for s in suspects if s.parts.any()])


def _noise(measurement: Measurement) -> float:
    """Returns how far a run's times are from another's for no reason, as a share."""
    return measurement.noise_floor or 0.0


def _memory(prediction: Prediction, measurement: Measurement) -> list[Seen]:
    predicted, measured = prediction.metrics.memory_bytes, measurement.metrics.memory_bytes
    if len(predicted) != len(measured):
        return []
    counted = {name for stage in measured for name in stage}
    return memory_seen([{k: v for k, v in s.items() if k in counted} for s in predicted], measured)


class _View:
    """A measurement beside the predicted parts of its plan."""

    def __init__(
        self, plan: ParallelPlan, parts: Parts, measurement: Measurement, noise: float
    ) -> None:
        self._plan, self._parts, self._run, self._noise = plan, parts, measurement, noise
        self._linked = {link.cls for link in measurement.links}

    def fitting(self, seen: Sequence[Seen]) -> list[Seen]:
        """Returns what was predicted or measured at all."""
        return [s for s in seen if s.predicted > 0 or s.measured > 0]

    def times(self) -> list[Seen]:
        """Returns busy seconds of every rank, traffic that links show left out."""
        out = []
        # A profiler may have seen traffic alone: what no rank has was not looked at.
        timed = {name for rank in self._run.ranks for name in rank.time_s}
        for rank in self._run.ranks:
            predicted = self._parts.time_s[rank.stage]
            for name in dict.fromkeys([*predicted, *rank.time_s]):
                if name in self._linked or name == "idle" or name not in timed:
                    continue
                out.append(
                    self._seen(
                        "time",
                        name,
                        (rank.rank,),
                        predicted.get(name, 0.0),
                        rank.time_s.get(name, 0.0),
                    )
                )
        return out

    def kernels(self) -> list[Seen]:
        """Returns seconds of kernel classes on every rank that a profiler saw."""
        return [
            self._seen("kernel", name, (rank.rank,), predicted.get(name, 0.0), found)
            for rank in self._run.ranks
            if rank.kernel_s
            for predicted in (comparable_kernels(self._parts.kernel_s[rank.stage], rank.kernel_s),)
            for name, found in rank.kernel_s.items()
        ]

    def links(self) -> list[Seen]:
        """Returns seconds of every link."""
        return [
            self._seen(
                "link",
                link.cls,
                link.ranks,
                predicted_link(self._plan, self._parts, self._run, link),
                link.seconds,
            )
            for link in self._run.links
        ]

    def _seen(
        self,
        of: Literal["time", "kernel", "link"],
        name: str,
        ranks: tuple[int, ...],
        predicted: float,
        measured: float,
    ) -> Seen:
        step_s = self._run.metrics.step_time_s
        noise = max(self._noise, LINK_NOISE) if of == "link" else self._noise
        sigma = time_sigma(predicted, measured, step_s, noise)
        return Seen(
            of=of,
            name=name,
            ranks=ranks,
            predicted=predicted,
            measured=measured,
            sigma=sigma,
        )

    def rank_suspects(self, seen: Sequence[Seen]) -> list[Suspect]:
        """Returns a suspect a rank whose compute is slow, where there are several, and all."""
        ranks = [r.rank for r in self._run.ranks]
        out = []
        if len(ranks) > 1:
            out = [
                suspect_where("rank", f"rank {rank}", seen, _computes(rank), (rank,))
                for rank in ranks
            ]
        everything = suspect_where(
            "machine", "compute of all ranks", seen, lambda s: s.of == "kernel" or _compute(s)
        )
        return [*out, everything]

    def link_suspects(self, seen: Sequence[Seen]) -> list[Suspect]:
        """Returns a suspect a link, a rank whose links all are slow, and all traffic."""
        links = [s for s in seen if s.of == "link"]
        out = [
            suspect_where(
                "link",
                link.name,
                seen,
                partial(operator.is_, link),
                link.ranks,
            )
            for link in links
        ]
        out += self._links_of_ranks(seen, links)
        if len({s.name for s in links}) > 1:
            out.append(suspect_where("link", "all traffic", seen, lambda s: s.of == "link"))
        return out

    def _links_of_ranks(self, seen: Sequence[Seen], links: Sequence[Seen]) -> list[Suspect]:
        """Returns a suspect a rank with all its links; ranks whose links are the same share one.

        The norm's sum over all ranks is a few bytes: what it takes is no link's.
        """
        everyone = tuple(range(self._plan.world_size))
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted({r for s in links for r in s.ranks}):
            mine = [i for i, s in enumerate(seen) if _sent_by(s, rank) and s.ranks != everyone]
            if mine:
                groups.setdefault(tuple(mine), []).append(rank)
        out = []
        for rows, ranks in groups.items():
            parts = np.zeros(len(seen))
            parts[list(rows)] = [seen[i].predicted or seen[i].measured for i in rows]
            name = f"links of {'ranks' if len(ranks) > 1 else 'rank'} {listed(ranks)}"
            out.append(Suspect(kind="link", name=name, ranks=tuple(ranks), parts=parts))
        return out


def _compute(seen: Seen) -> bool:
    return seen.of == "time" and seen.name in COMPUTE


def _computes(rank: int) -> Callable[[Seen], bool]:
    return lambda s: s.ranks == (rank,) and (s.of == "kernel" or _compute(s))


def _sent_by(seen: Seen, rank: int) -> bool:
    """Returns whether a rank's adapter carries a link: what it sends, and its collectives."""
    if seen.of != "link":
        return False
    return seen.ranks[0] == rank if seen.name == "pp_comm" else rank in seen.ranks


def predicted_link(
    plan: ParallelPlan, parts: Parts, measurement: Measurement, link: LinkTime
) -> float:
    """Returns the predicted seconds of a link.

    Where a rank has traffic of one class with several groups, its prediction is shared
    out as the measurement has it; the norm's sum over all ranks is known by itself.
    """
    stage = stage_of_rank(plan, link.ranks[0])
    if link.cls == "pp_comm":
        return parts.messages_s.get((stage, stage_of_rank(plan, link.ranks[1])), 0.0)
    whole = parts.time_s[stage].get(link.cls, 0.0)
    everyone = tuple(range(plan.world_size))
    mine = [x for x in measurement.links if x.cls == link.cls and link.ranks[0] in x.ranks]
    if link.cls == "dp_comm" and len(mine) > 1 and any(x.ranks == everyone for x in mine):
        if link.ranks == everyone:
            return parts.norm_s
        whole -= parts.norm_s
        mine = [x for x in mine if x.ranks != everyone]
    total = sum(x.seconds for x in mine)
    return whole * link.seconds / total if total else whole
