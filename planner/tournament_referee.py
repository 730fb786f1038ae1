"""Who may go on in a race: the time is spent on plans that may still be the fastest.

After every round in which all have run, plans leave that are slower than the fastest beyond
doubt; at two points of the time, of those that are left, the slower half leaves (successive
halving, Jamieson and Talwalkar 2016) where it is likely behind. Doubt includes the luck of a
launch, which more rounds of it do not average away. Plans that the report is about stay to the
end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from flopwright.planner.tournament_times import (
    PRIOR_LAUNCH,
    Times,
    TurnTime,
    kept_turns,
    launch_scatter,
    paired_times,
)

# A plan leaves when it is slower by more than this and by more than so many deviations.
CLEARLY: Final = 0.05
_DEVIATIONS: Final = 3.0
# Kept turns of every plan before anyone leaves for less than this: far behind is seen at once.
_LEAST_TURNS: Final = 2
FAR_BEHIND: Final = 0.3
# One turn may have met a burst of other work.
FAR_AT_ONCE: Final = 0.6
# Shares of the time after which only a half, and then a third, goes on; who is not slower than
# the fastest by so many deviations goes on all the same.
HALVINGS: Final = ((0.5, 0.5), (0.8, 0.35))
_LIKELY: Final = 2.5
_LEAST_LEFT: Final = 3
_LEAST_TIES: Final = 2
# Launches of a race: its luck is a launch's, so that more time is worth more of them.
_LEGS: Final = (3, 5)
_LEG_S: Final = 40.0
# The first launch, which still has all plans, takes more than its part of the time.
_FIRST_LEG: Final = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A race's rules.

    Attributes:
        names: all plans; `stay` are those that never leave.
        budget_s: seconds of the race; the round that is running at its end is the last.
        timeout_s: a plan leaves when its turns have taken so many seconds in all.
        max_rounds: rounds (the warm-up among them) after which there is no more to learn.
        steps_per_turn: optimizer steps of a turn.
        halvings: (share of the time, share of the plans that go on from then).
        earlier: turns of launches before this one, warm-up among them, each launch with a
            number of its own.
        twin: (plan, its second name), where one runs twice.
    """

    names: tuple[str, ...]
    stay: frozenset[str]
    budget_s: float
    timeout_s: float = math.inf
    max_rounds: int = 40
    steps_per_turn: int = 2
    halvings: tuple[tuple[float, float], ...] = HALVINGS
    earlier: tuple[TurnTime, ...] = ()
    twin: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the referee says after a turn: who takes no more turns, and whether all is over."""

    retired: dict[str, str]
    stop: bool


def decide(
    rules: Rules, turns: Sequence[TurnTime], retired: Collection[str], elapsed_s: float
) -> Decision:
    """Returns who leaves now, with the reason, and whether the race ends.

    Args:
        turns: of this launch so far, in order.
        retired: who left before.
        elapsed_s: since the race's first turn began.
    """
    running = [n for n in rules.names if n not in retired]
    rounds = len({t.round for t in turns if t.plan in running})
    over = elapsed_s >= rules.budget_s or rounds >= rules.max_rounds
    late = _late(rules, turns, running)
    if late or not _all_had(turns, running, rounds):
        return Decision(retired=late, stop=over)
    if rounds <= 1:
        return Decision(retired={}, stop=over)
    kept = kept_turns([*rules.earlier, *turns])
    times = paired_times(kept, launch_scatter(kept, rules.twin))
    early = rounds - 1 < _LEAST_TURNS
    gone = _clearly_slower(rules, times, running, FAR_AT_ONCE if early else CLEARLY)
    if not early:
        gone |= _halved(rules, times, [n for n in running if n not in gone], elapsed_s)
    return Decision(retired=gone, stop=over)


def legs_of(budget_s: float) -> int:
    """Returns the launches of a tournament's race: 3, and up to 5 with more time."""
    fewest, most = _LEGS
    return int(min(most, max(fewest, budget_s // _LEG_S)))


def leg_rules(
    leg: int,
    legs: int,
    names: Sequence[str],
    *,
    chosen: str,
    twin: str,
    stay: Collection[str],
    left_s: float,
) -> Rules:
    """Returns the rules of a race's launch number `leg` of `legs`, from 0 on.

    In the first one the slower half leaves too; each runs its plans in another order than the
    one before.

    Args:
        names: who is still in the race, the twin not among them.
        chosen, twin: the two entries of the planner's choice; they stay, as `stay` do.
        left_s: seconds for this launch and those after it.
    """
    entries = (*names, twin)
    return Rules(
        names=entries if leg % 2 == 0 else entries[::-1],
        stay=frozenset({*stay, chosen, twin}),
        budget_s=left_s * (_FIRST_LEG / legs if leg == 0 else 1.0 / (legs - leg)),
        halvings=HALVINGS if leg == 0 else (),
        twin=(chosen, twin),
    )


def worth_racing(names: Sequence[str], heat: Sequence[TurnTime]) -> dict[str, str]:
    """Returns who of `names` need not race, with the reason: far behind in the heat already.

    The two fastest race whatever the heat said: they tie the times of both launches together.
    """
    kept = kept_turns([t for t in heat if t.plan in names])
    if not kept:
        return {}
    times = paired_times(kept, PRIOR_LAUNCH)
    ordered = sorted(times.plans, key=lambda n: times.plans[n].step_s)
    return {
        name: f"{times.ratio(name, ordered[0]) - 1:.0%} slower than {ordered[0]} in the heat"
        for name in ordered[_LEAST_TIES:]
        if times.ratio(name, ordered[0]) > 1 + FAR_BEHIND
        and _behind(times, name, ordered[0]) > _DEVIATIONS
    }


def _late(rules: Rules, turns: Sequence[TurnTime], running: Sequence[str]) -> dict[str, str]:
    """Returns the plans that have used up their own time; of them the last may be who stays."""
    used = dict.fromkeys(running, 0.0)
    for turn in turns:
        if turn.plan in used:
            used[turn.plan] += turn.step_s * rules.steps_per_turn
    return {
        name: f"its turns took {seconds:.0f} s, more than the {rules.timeout_s:g} s of a trial"
        for name, seconds in used.items()
        if seconds > rules.timeout_s
    }


def _all_had(turns: Sequence[TurnTime], running: Sequence[str], rounds: int) -> bool:
    """Returns whether every plan that goes on has had its turn in every round so far."""
    counts = dict.fromkeys(running, 0)
    for turn in turns:
        if turn.plan in counts:
            counts[turn.plan] += 1
    return bool(running) and set(counts.values()) == {rounds}


def _clearly_slower(
    rules: Rules, times: Times, running: Sequence[str], margin: float
) -> dict[str, str]:
    best = times.fastest(running)
    gone = {}
    for name in running:
        slower = times.ratio(name, best)
        sure = slower > 1 + margin and _behind(times, name, best) > _DEVIATIONS
        if name not in rules.stay and sure:
            gone[name] = f"{slower - 1:.0%} slower than {best}"
    return gone


def _halved(
    rules: Rules, times: Times, running: Sequence[str], elapsed_s: float
) -> dict[str, str]:
    """Returns who is likely behind of the slower part, once each point of the time is passed."""
    share = next(
        (left for point, left in reversed(rules.halvings) if elapsed_s > point * rules.budget_s),
        1.0,
    )
    allowed = max(_LEAST_LEFT, math.ceil(share * len(rules.names)))
    ordered = sorted(running, key=lambda n: times.plans[n].step_s)
    return {
        name: f"not among the best {allowed} when {elapsed_s:.0f} s had passed"
        for name in ordered[allowed:]
        if name not in rules.stay and _behind(times, name, ordered[0]) > _LIKELY
    }


def _behind(times: Times, name: str, best: str) -> float:
    """Returns by how many deviations a plan is slower than another."""
    return math.log(times.ratio(name, best)) / times.ratio_log_std(name, best)
