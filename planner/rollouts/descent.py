"""From coarse to fine: a search of grids that are too large to be simulated whole.

1. Every structure (layout, GPUs that generate, instance) is bounded in closed form under the
   policies that promise most; of each layout and share the instances that promise most go on.
2. These are simulated for a short look, best first, under a policy of plain values.
3. From the best of each layout one axis after the other is moved to its neighbours, for as
   long as that helps; short looks again, what cannot be faster than the layout's best left out.
4. What came out as fast or fresh, within what a short look may be off by, is simulated in full.

What was not looked at is bounded too: `Covered.most` says how fast the fastest of it could be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flopwright.planner.rollouts.best_first import Reached, front_of
from flopwright.planner.rollouts.bounds import most_per_s
from flopwright.planner.rollouts.choices import Axes, Choice, with_values
from flopwright.planner.rollouts.known import Known, ranked_of
from flopwright.spec.rollouts.scenario import Switch

_SHAPES: Final = 2  # instances of a layout and share that go on from the closed forms
_OFF: Final = 0.05  # what a short look may be off by
_FINALISTS: Final = 6  # simulated in full beside the front
_FRONT_FINALS: Final = 12  # points of the front simulated in full
_MOVES: Final = 12  # of one descent
_FRONT: Final = 3  # points of a layout's front from which it is moved on


@dataclass(frozen=True, slots=True)
class Covered:
    """What a coarse-to-fine search looked at.

    Attributes:
        space: choices of the grid; structures: layouts with their GPUs and instances;
            unbounded: structures that the time did not suffice to bound.
        bounded: choices whose bound was computed; screened: those with a short look.
        most: the most that any choice not looked at can reach, in what is made largest.
        settled: no neighbour of the best is better; otherwise the search ended before all were
            looked at: the time was up (`timed_out`), or it had made as many moves as it may.
        unfinished: finalists that the time did not suffice to simulate in full.
    """

    space: int
    structures: int
    unbounded: int
    bounded: int
    screened: int
    most: float
    settled: bool
    timed_out: bool
    unfinished: int


def coarse_to_fine(known: Known, axes: Axes) -> Covered:
    """Searches the axes; what is found is in `known`."""
    structures = tuple(axes.structures())
    promised: dict[Choice, float] = {}
    for one in structures:
        if any(promised.values()) and known.time_is_up(short=True):
            break
        promised[one] = most_of(known, axes, one)
    chosen = _promising(tuple(promised), promised)
    known.explore((a for one in chosen for a in _anchors(known, axes, one)), short=True)
    ranked = sorted(axes.layouts, key=lambda layout: -_best_value(known, layout))
    settled = True
    for layout in ranked:
        settled &= _descend(known, axes, layout)
    timed_out = known.time_is_up(short=True)
    unfinished = _finals(known)
    return Covered(
        space=axes.size(),
        structures=len(structures),
        unbounded=len(structures) - len(promised),
        bounded=len(known.roughs),
        screened=len(known.screened),
        most=max(promised.values(), default=0.0),
        settled=settled,
        timed_out=timed_out and not settled,
        unfinished=unfinished,
    )


def _best_value(known: Known, layout: str) -> float:
    return max((r.value for r in _of_layout(known, layout).values() if r.counts), default=0.0)


def _promising(structures: tuple[Choice, ...], promised: dict[Choice, float]) -> list[Choice]:
    """Returns, of every layout and share, the instances that promise most."""
    groups: dict[tuple[str, int], list[Choice]] = {}
    for one in structures:
        groups.setdefault((one.layout, one.generation_gpus), []).append(one)
    out: list[Choice] = []
    for group in groups.values():
        out += sorted(group, key=lambda one: -promised[one])[:_SHAPES]
    return out


def most_of(known: Known, axes: Axes, structure: Choice) -> float:
    """Returns the most that any policy of a structure can reach, in what is made largest.

    States switch in no time and nothing limits slots. The bound grows with lambda and with the
    versions ahead, but for the noise of what a simulation draws: both ends are tried.
    """
    policy = axes.policy(structure)
    best = 0.0
    widest = {
        "elastic": policy["elastic"][-1],
        "states": policy["states"][-1],  # where they take no memory of the GPUs
        "slots": 0,
        "throttled": False,
    }
    name = "staleness_bound" if structure.layout == "async" else "stop_fraction"
    for value in {min(policy[name]), max(policy[name])}:
        made = known.rough(with_values(structure, {name: value, **widest}))
        if made.scenario is None:
            continue
        most = made.most
        if structure.layout == "colocated":
            still = made.scenario.model_copy(update={"switch": Switch()})
            most = most_per_s(still, known.work, known.rounds)
        best = max(best, known.value(made, most))
    return best


def _anchors(known: Known, axes: Axes, structure: Choice) -> list[Choice]:
    """Returns a structure under plain policies: the scenario's lambda, and no lambda at all.

    Training states are tried in every place: which ones hold them is known with the update only.
    """
    policy = axes.policy(structure)
    own = known.loop.rollout.fraction
    fractions = policy["stop_fraction"]
    nearest = min(fractions, key=lambda x: abs(x - own))
    bounds = policy["staleness_bound"]
    out = []
    for fraction in dict.fromkeys((nearest, max(fractions))):
        plain = with_values(
            structure,
            {
                "stop_fraction": fraction,
                "staleness_bound": bounds[len(bounds) // 2 - (len(bounds) > 1)],
                "throttled": policy["throttled"][-1],
            },
        )
        out += [with_values(plain, {"states": place}) for place in policy["states"]]
    return list(dict.fromkeys(out))


def _descend(known: Known, axes: Axes, layout: str) -> bool:
    """Moves from the best of a layout to better neighbours; returns whether none is left."""
    tried: set[Choice] = set()
    for _ in range(_MOVES):
        if known.time_is_up(short=True):
            return False
        starts = [c for c in _leaders(known, layout) if c not in tried]
        if not starts:
            return True
        tried |= set(starts)
        near = [n for start in starts for n in axes.neighbours(start) if n.layout == layout]
        known.explore(near, short=True)
    return False


def _leaders(known: Known, layout: str) -> list[Choice]:
    """Returns the best choice of a layout, and some of the freshest to the fastest."""
    mine = _of_layout(known, layout)
    ranked = ranked_of(mine)[:1]
    choices = known.candidates
    return [choices[i].choice for i in dict.fromkeys([*ranked, *_spread(front_of(mine), _FRONT)])]


def _of_layout(known: Known, layout: str) -> dict[int, Reached]:
    return {
        i: r
        for i, r in known.screened.items()
        if i in known.candidates and known.candidates[i].choice.layout == layout
    }


def _spread(order: Sequence[int], most: int) -> list[int]:
    """Returns at most so many, from the first to the last, evenly."""
    if len(order) <= most:
        return list(order)
    return [order[round(k * (len(order) - 1) / (most - 1))] for k in range(most)]


def _different(screened: dict[int, Reached], order: Sequence[int]) -> list[int]:
    """Returns the candidates that reach something of their own: of equals the first."""
    seen: set[tuple[float, float]] = set()
    out = []
    for i in order:
        reached = (round(screened[i].value, 12), round(screened[i].level, 12))
        if reached not in seen:
            seen.add(reached)
            out.append(i)
    return out


def _finals(known: Known) -> int:
    """Simulates in full what a short look found fast, or fresh for its speed.

    Returns how many the time did not suffice for.
    """
    screened = {i: r for i, r in known.screened.items() if r.counts}
    if not screened:
        return 0
    ranked = _different(screened, ranked_of(screened))
    enough = screened[ranked[0]].value * (1 - _OFF)
    chosen = [i for i in ranked if screened[i].value >= enough][:_FINALISTS]
    chosen += _spread(_different(screened, front_of(screened)), _FRONT_FINALS)
    promised = {
        i: (screened[i].value * (1 + _OFF), screened[i].level * (1 - 2 * _OFF)) for i in chosen
    }
    last = [known.candidates[i].choice for i in dict.fromkeys(chosen)]
    return len(known.explore(last, promised=promised).left)
