"""Which slowdown explains a run best: suspects against what was predicted and measured.

Every number seen twice (predicted p, measured m) has a difference d = m - p and a deviation
sigma of its own; besides, a calibration may be off in a class as a whole, on all ranks alike:
with the predictions p_c of each class c, the covariance is S = diag(sigma^2) + sum_c drift^2
p_c p_c'. A suspect scales parts a of the predictions by an unknown factor f and explains
d = (f - 1) a: generalised least squares gives f - 1 = a' S^-1 d / a' S^-1 a, and its gain in
chi-squared, (a' S^-1 d)^2 / a' S^-1 a. The suspect of the largest gain is taken, all taken
ones are fitted again together, and the rest is searched once more, until no gain stands out
(orthogonal matching pursuit: Mallat and Zhang 1993, Pati et al. 1993).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["time", "kernel", "rank", "link", "memory", "machine"]
Array = NDArray[np.float64]

# 3.5 standard deviations.
SIGNIFICANT: Final = 3.5**2
# What is left after the first cause must explain this share of what that one did: a planted
# cause that bends the rest a little does not bring a second one with it.
_NEXT_SHARE: Final = 0.02
_MOST: Final = 5
# Suspects whose gains differ by less cannot be told apart; the one named earlier stands.
_SAME_GAIN: Final = 1e-3
# What an inferred suspect's gain must be beyond the next one's.
_CLEARLY: Final = 9.0
# Of a time that a class takes, and of the step: what runs differ by without a cause.
TIME_NOISE: Final = 0.03
STEP_NOISE: Final = 0.0002
# Links differ more from each other than a processor from itself.
LINK_NOISE: Final = 0.08
# How far a calibration may be off in a class as a whole, on all ranks alike (1 sigma).
_DRIFT: Final = {"time": 0.03, "kernel": 0.04, "link": 0.05, "memory": 0.01}
# Tensors are counted, not timed.
MEMORY_NOISE: Final = 0.015
STAGE_NOISE: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One number that was predicted and measured, in seconds or bytes.

    Attributes:
        of: what it is of: time class, kernel class, traffic of a class, or memory class.
        ranks: whose; of a message (sender, receiver). Of memory the stage.
        sigma: its deviation where nothing is wrong.
    """

    of: Literal["time", "kernel", "link", "memory"]
    name: str
    ranks: tuple[int, ...]
    predicted: float
    measured: float
    sigma: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """What may be slow (or large), and the part of each prediction that it scales.

    Attributes:
        inferred: nobody saw it by itself: it is named only where nothing else comes near.
    """

    kind: Kind
    name: str
    ranks: tuple[int, ...] = ()
    parts: Array
    inferred: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A suspect that stands out.

    Attributes:
        factor: by which it takes more than predicted.
        sigmas: how far it stands out of the noise.
        explained: seconds (bytes) that it adds, on the rank or stage that it adds most to;
            predicted, measured: of the same things together.
    """

    kind: Kind
    name: str
    ranks: tuple[int, ...]
    factor: float
    sigmas: float
    predicted: float
    measured: float
    explained: float


def time_sigma(predicted: float, measured: float, step_s: float, noise: float) -> float:
    """Returns the deviation of a class's seconds: a share of its own and of the step."""
    return math.hypot(max(TIME_NOISE, noise) * max(predicted, measured), STEP_NOISE * step_s)


def memory_sigma(predicted: float, stage_bytes: float) -> float:
    """Returns the deviation of a memory class's bytes."""
    return math.hypot(MEMORY_NOISE * predicted, STAGE_NOISE * stage_bytes)


def name_causes(seen: Sequence[Seen], suspects: Sequence[Suspect]) -> tuple[Cause, ...]:
    """Returns the causes that stand out, by how they were found: the clearest first."""
    if not seen or not suspects:
        return ()
    inverse = _Inverse.of(seen)
    gone = np.array([s.measured - s.predicted for s in seen])
    parts = np.array([s.parts for s in suspects], float)
    weighted = inverse.times(parts.T).T  # a' S^-1, a row a suspect
    norms = np.maximum((weighted * parts).sum(axis=1), 1e-300)
    inferred = np.array([s.inferred for s in suspects])
    chosen: list[int] = []
    gains: list[float] = []
    rest, factors = gone, np.zeros(0)
    while len(chosen) < _MOST:
        gain = (weighted @ rest) ** 2 / norms
        gain[chosen] = 0.0
        most = float(gain.max())
        if most < max(SIGNIFICANT, _NEXT_SHARE * max(gains, default=0.0)):
            break
        if inferred[gain.argmax()] and (np.sort(gain)[:-1] > most - _CLEARLY).any():
            gain[inferred] = 0.0
            most = float(gain.max())
            if most < SIGNIFICANT:
                break
        best = int(np.argmax(gain >= most * (1 - _SAME_GAIN)))  # of equal ones the first
        chosen.append(best)
        gains.append(most)
        normal = weighted[chosen] @ parts[chosen].T
        factors = np.linalg.lstsq(normal, weighted[chosen] @ gone, rcond=None)[0]
        rest = gone - parts[chosen].T @ factors
    return tuple(
        _cause(seen, suspects[i], float(f), math.sqrt(g))
        for i, f, g in zip(chosen, factors, gains, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Inverse:
    """The inverse of S by Woodbury: few classes drift, however many ranks there are."""

    weights: Array  # 1 / sigma^2
    drifts: Array  # (seen, classes)

    @classmethod
    def of(cls, seen: Sequence[Seen]) -> _Inverse:
        """Returns that of some numbers."""
        names = list(dict.fromkeys((s.of, s.name) for s in seen))
        drifts = np.zeros((len(seen), len(names)))
        for i, s in enumerate(seen):
            drifts[i, names.index((s.of, s.name))] = _DRIFT[s.of] * s.predicted
        return cls(np.array([s.sigma for s in seen]) ** -2.0, drifts)

    def times(self, columns: Array) -> Array:
        """Returns S^-1 times some columns, (seen, columns)."""
        alone = self.weights[:, None] * columns
        scaled = self.weights[:, None] * self.drifts
        inner = np.eye(self.drifts.shape[1]) + self.drifts.T @ scaled
        return np.asarray(alone - scaled @ np.linalg.solve(inner, self.drifts.T @ alone))


def _cause(seen: Sequence[Seen], suspect: Suspect, more: float, sigmas: float) -> Cause:
    """Returns the cause with the seconds or bytes of the place that it adds most to."""
    scaled: list[int] = np.flatnonzero(suspect.parts).tolist()
    # Kernels are parts of times: one of the two is shown, the suspect's own kind.
    own = [i for i in scaled if (seen[i].of == "kernel") == (suspect.kind == "kernel")]
    touched = own or scaled
    places: dict[tuple[int, ...], list[int]] = {}
    for i in touched:
        # Links stand for themselves; times of a rank, and memory of a stage, add up.
        place = (*seen[i].ranks, -1) if seen[i].of == "link" else seen[i].ranks
        places.setdefault(place, []).append(i)
    most = max(places.values(), key=lambda rows: abs(more) * sum(suspect.parts[i] for i in rows))
    return Cause(
        kind=suspect.kind,
        name=suspect.name,
        ranks=suspect.ranks,
        factor=1 + more,
        sigmas=sigmas,
        predicted=sum(seen[i].predicted for i in most),
        measured=sum(seen[i].measured for i in most),
        explained=more * float(sum(suspect.parts[i] for i in most)),
    )


def suspect_where(
    kind: Kind,
    name: str,
    seen: Sequence[Seen],
    of: Callable[[Seen], bool],
    ranks: tuple[int, ...] = (),
) -> Suspect:
    """Returns the suspect that scales all that `of` says yes to.

    What was not predicted at all has nothing to scale: there its measured value stands.
    """
    parts = np.array([s.predicted if of(s) else 0.0 for s in seen])
    if not parts.any():
        parts = np.array([s.measured if of(s) else 0.0 for s in seen])
    return Suspect(kind=kind, name=name, ranks=ranks, parts=parts)


def class_suspects(seen: Sequence[Seen]) -> list[Suspect]:
    """Returns a suspect a time class and a memory class; a memory class also by stage."""
    out = []
    for name in dict.fromkeys(s.name for s in seen if s.of in {"time", "link"}):
        out.append(suspect_where("time", name, seen, partial(_is, name, ("time", "link"))))
    for name in dict.fromkeys(s.name for s in seen if s.of == "memory"):
        out.append(suspect_where("memory", name, seen, partial(_is, name, ("memory",))))
    stages = dict.fromkeys((s.name, s.ranks) for s in seen if s.of == "memory")
    if len({ranks for _, ranks in stages}) > 1:
        out += [_memory_of_stage(seen, name, ranks) for name, ranks in stages]
    return out


def _memory_of_stage(seen: Sequence[Seen], name: str, ranks: tuple[int, ...]) -> Suspect:
    return suspect_where(
        "memory", name, seen, lambda s: _is(name, ("memory",), s) and s.ranks == ranks, ranks
    )


def _is(name: str, of: tuple[str, ...], seen: Seen) -> bool:
    return seen.name == name and seen.of in of


def memory_seen(
    predicted: Sequence[Mapping[str, float]], measured: Sequence[Mapping[str, float]]
) -> list[Seen]:
    """Returns the memory classes of every stage, "reserved" left out."""
    out = []
    for stage, (p, m) in enumerate(zip(predicted, measured, strict=True)):
        whole = sum(v for k, v in m.items() if k != "reserved")
        for name in dict.fromkeys([*p, *m]):
            mine, theirs = float(p.get(name, 0)), float(m.get(name, 0))
            if name != "reserved" and (mine or theirs):
                out.append(
                    Seen(
                        of="memory", name=name, ranks=(stage,), predicted=mine, measured=theirs,
                        sigma=memory_sigma(mine, whole),
                    )
                )  # fmt: skip
    return out
