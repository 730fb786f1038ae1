"""What a comparison found, as records and in words: causes, and the two parts of an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from flopwright.report.causes import Cause
from flopwright.spec.base import Spec
from flopwright.units import show_bytes, show_seconds

FindingKind = Literal["time", "memory", "kernel", "rank", "link", "machine", "waiting"]

# Waiting follows from what others take: it is named before a cause only where it is much more.
_WAITING_SHARE: Final = 0.1
_WAITING_OVER_CAUSE: Final = 2.0


class Finding(Spec):
    """Something that a run shows beyond its prediction.

    Attributes:
        kind: "time" and "memory" are classes of report/metrics.py, "kernel" a kernel class,
            "rank" one rank's compute, "link" traffic between ranks, "machine" all compute,
            "waiting" time in which nobody works although the list would not have it.
        ranks: whose; of a memory class the stage. Empty of all.
        share: (predicted - measured) / measured whole (step time, or tensor bytes of the
            fullest stage).
        factor: by which the cause alone takes more than predicted, fitted beside the other
            causes and to all that it is part of; so it need not be measured / predicted, which
            are of all that the cause is part of. None where nothing was singled out.
        sigmas: how far it stands out of the noise; None likewise.
    """

    kind: FindingKind
    name: str
    ranks: tuple[int, ...] = ()
    predicted: float
    measured: float
    share: float
    factor: float | None = None
    sigmas: float | None = None
    text: str


class ErrorSplit(Spec):
    """The step time's signed error in two parts, which sum to it.

    Attributes:
        replayed_s: the simulator's list with what the run's parts took.
        cost: (predicted - replayed) / measured: what actions were thought to take.
        structure: (replayed - measured) / measured: waiting, overlap, and what no action holds.
        basis: what the parts were: the run's own "actions", or its time classes, by rank
            ("ranks") or of the critical one ("classes").
    """

    replayed_s: PositiveFloat
    cost: float
    structure: float
    basis: Literal["actions", "ranks", "classes"]


class RankRow(Spec):
    """One rank: busy seconds, compute and traffic apart, predicted and measured."""

    rank: int
    stage: int
    compute_predicted_s: NonNegativeFloat
    compute_measured_s: NonNegativeFloat
    traffic_predicted_s: NonNegativeFloat
    traffic_measured_s: NonNegativeFloat


class LinkRow(Spec):
    """One link: seconds of its traffic, predicted and measured."""

    cls: str
    ranks: tuple[int, ...]
    predicted_s: NonNegativeFloat
    measured_s: NonNegativeFloat


class KernelRow(Spec):
    """One kernel class: seconds on the mean rank, predicted and measured."""

    name: str
    predicted_s: NonNegativeFloat
    measured_s: NonNegativeFloat


def ordered(
    causes: Sequence[Cause], step_s: float, stage_bytes: Sequence[int], split: ErrorSplit | None
) -> tuple[Finding, ...]:
    """Returns findings, the largest effect first.

    Args:
        step_s: measured step time; stage_bytes: measured tensor bytes of each stage.
        split: its structure error is a finding too, where it is large.
    """
    found = [_finding(cause, step_s, stage_bytes) for cause in causes]
    found.sort(key=lambda f: -abs(f.share))
    if split is not None and abs(split.structure) > _WAITING_SHARE:
        waiting = _waiting(split, step_s)
        most = abs(found[0].share) if found else 0.0
        place = 0 if abs(split.structure) > _WAITING_OVER_CAUSE * most else len(found)
        found.insert(place, waiting)
    return tuple(found)


def _finding(cause: Cause, step_s: float, stage_bytes: Sequence[int]) -> Finding:
    memory, whole = cause.kind == "memory", step_s
    if memory:
        whole = stage_bytes[cause.ranks[0]] if cause.ranks else max(stage_bytes, default=0)
    share = -cause.explained / whole if whole else 0.0
    return Finding(
        kind=cause.kind,
        name=cause.name,
        ranks=cause.ranks,
        predicted=cause.predicted,
        measured=cause.measured,
        share=share,
        factor=cause.factor,
        sigmas=cause.sigmas,
        text=f"{label_of(cause.kind, cause.name, cause.ranks)}: "
        f"{_amounts(memory, cause.predicted, cause.measured)}{_factors(cause)}; "
        f"{_side(share, memory)}",
    )


def _factors(cause: Cause) -> str:
    """Returns measured / predicted in words, and the cause's own factor where it is another."""
    if cause.predicted <= 0:
        return ""
    ratio, own = (f"{f:.3g}" for f in (cause.measured / cause.predicted, cause.factor))
    if ratio == own:
        return f" (x {ratio})"
    return f" (x {ratio}; the cause alone x {own})"


def label_of(kind: str, name: str, ranks: Sequence[int]) -> str:
    """Returns what a finding is about: "gemm (kernel)", "pp_comm 2 > 3 (link)"."""
    if kind == "rank" or not ranks:
        return f"{name} ({kind})" if kind != "rank" else name
    if kind == "memory":
        return f"{name} of stage {ranks[0]} (memory)"
    if name.startswith("links of"):
        return name
    return f"{link_label(name, ranks)} (link)"


def link_label(name: str, ranks: Sequence[int]) -> str:
    """Returns a link in words: "pp_comm from rank 2 to 3"."""
    if name == "pp_comm" and len(ranks) == 2:
        return f"{name} from rank {ranks[0]} to {ranks[1]}"
    return f"{name} of ranks {listed(ranks)}"


def listed(ranks: Sequence[int]) -> str:
    """Returns ranks as text: "0, 1, 2 and 13 more"."""
    shown = ", ".join(map(str, ranks[:4]))
    return shown if len(ranks) <= 4 else f"{shown} and {len(ranks) - 4} more"


def _amounts(memory: bool, predicted: float, measured: float) -> str:
    show = show_bytes if memory else show_seconds
    return f"predicted {show(predicted)}, measured {show(measured)}"


def _side(share: float, memory: bool) -> str:
    whole = "fullest stage's tensors" if memory else "step"
    return f"{abs(share):.1%} of the {whole} {'too much' if share > 0 else 'too little'}"


def _waiting(split: ErrorSplit, step_s: float) -> Finding:
    more = "longer" if split.structure < 0 else "shorter"
    return Finding(
        kind="waiting",
        name="structure",
        predicted=split.replayed_s,
        measured=step_s,
        share=split.structure,
        text=f"waiting and overlap: the step is {abs(split.structure):.1%} {more} than its "
        f"actions, replayed, would make it",
    )


def class_finding(kind: Literal["time", "memory"], name: str, predicted: float, measured: float,
                  share: float) -> Finding:  # fmt: skip
    """Returns the finding that a class is, where nothing stands out of the noise."""
    memory = kind == "memory"
    return Finding(
        kind=kind,
        name=name,
        predicted=predicted,
        measured=measured,
        share=share,
        text=f"{name} ({kind}): {_amounts(memory, predicted, measured)}; {_side(share, memory)}",
    )
