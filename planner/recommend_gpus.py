"""The fewest GPUs that meet a deadline or a budget: whole nodes, planned anew at each size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from flopwright.planner.recommend_answer import (
    Attempt,
    Means,
    Planned,
    Recommendation,
    assumptions_of,
    bound_by,
    planned,
)
from flopwright.planner.recommend_sizes import (
    DAY_S,
    Goal,
    days_of,
    least_nodes,
    show_usd,
    sizes_of,
    usd_of,
    with_nodes,
)
from flopwright.planner.whole_run import WholeRun
from flopwright.spec.scenario import Scenario
from flopwright.units import plural, show_bytes, show_seconds

# Larger clusters tried after one that is too dear, as long as they get cheaper.
_PATIENCE: Final = 2
State = Literal["ok", "small", "dear", "illegal"]


def fewest_gpus(scenario: Scenario, goal: Goal, means: Means) -> Recommendation:
    """Returns the smallest cluster of the scenario's nodes whose best plan meets the goal.

    The sizes are bisected, the search planned anew at each: more nodes are taken to hold more
    and to be no slower. With `every_size` nothing is taken for granted. A budget that the
    smallest cluster in time breaks is looked for in larger ones while they get cheaper.

    Raises:
        InputError: a budget without a price, or a limit below one node.
    """
    hunt = _Hunt(scenario=scenario, goal=goal, means=means, sizes=sizes_of(scenario, goal))
    nodes = hunt.smallest()
    if goal.every_size:
        nodes = hunt.all_below(nodes)
    if nodes is not None and hunt.state(nodes) == "dear":
        nodes = hunt.cheaper_above(nodes)
    return _found(hunt, nodes) if nodes is not None else _nothing(hunt)


@dataclass(slots=True)
class _Hunt:
    """The search over sizes in progress, every size planned once."""

    scenario: Scenario
    goal: Goal
    means: Means
    sizes: list[int]
    tried: dict[int, Planned] = field(default_factory=dict)

    def plan(self, nodes: int) -> Planned:
        if nodes not in self.tried:
            gpus = plural(nodes * self.scenario.cluster.node.gpus, "GPU")
            self.means.say(f"planning {gpus}")
            self.tried[nodes] = planned(with_nodes(self.scenario, nodes), self.means)
        return self.tried[nodes]

    def state(self, nodes: int) -> State:
        found = self.plan(nodes)
        if found.result is None:
            return "illegal"
        if found.run is None or self._late(found.run):
            return "small"
        return "dear" if self._dear(found.run) else "ok"

    def _late(self, run: WholeRun) -> bool:
        deadline = self.goal.deadline_s
        return deadline is not None and days_of(run, self.goal.sure) * DAY_S > deadline

    def _dear(self, run: WholeRun) -> bool:
        budget, cost = self.goal.budget_usd, usd_of(run, self.goal.sure)
        return budget is not None and cost is not None and cost > budget

    def smallest(self) -> int | None:
        """Returns the smallest size that is not too small, by bisection from the own size."""
        self.sizes = [n for n in self.sizes if n >= least_nodes(self.scenario, self.goal)]
        own = self.scenario.cluster.num_nodes
        low, high = -1, self._legal(_last_up_to(self.sizes, own))
        while high is not None and self.state(self.sizes[high]) == "small":
            low = high
            top = len(self.sizes) - 1
            if high == top:
                return None
            high = self._legal(min(top, _last_up_to(self.sizes, 2 * self.sizes[high], low + 1)))
        if high is None:
            return None
        low, high = self._halved(low, high)
        while high - low > 1:
            middle = (low + high) // 2
            state = self.state(self.sizes[middle])
            if state == "illegal":
                del self.sizes[middle]
                high -= 1
            elif state == "small":
                low = middle
            else:
                high = middle
        return self.sizes[high]

    def _halved(self, low: int, high: int) -> tuple[int, int]:
        """Returns the bracket after halving from `high` down: halves divide the batch best."""
        while high - low > 1:
            half = _last_up_to(self.sizes, self.sizes[high] // 2)
            if half <= low or self.sizes[half] > self.sizes[high] // 2:
                break
            state = self.state(self.sizes[half])
            if state == "illegal":
                del self.sizes[half]
                high -= 1
            elif state == "small":
                return half, high
            else:
                high = half
        return low, high

    def _legal(self, index: int) -> int | None:
        """Returns the index, or the nearest one with a legal plan; illegal sizes are dropped."""
        while self.sizes:
            index = min(index, len(self.sizes) - 1)
            if self.state(self.sizes[index]) != "illegal":
                return index
            del self.sizes[index]
        return None

    def all_below(self, nodes: int | None) -> int | None:
        """Returns the first of all sizes that is not too small, each of them planned."""
        for size in self.sizes:
            if nodes is not None and size >= nodes:
                break
            if self.state(size) in ("ok", "dear"):
                return size
        return nodes

    def cheaper_above(self, nodes: int) -> int | None:
        """Returns the first larger size inside the budget; None once they get dearer."""
        cheapest, dearer = math.inf, 0
        for size in self.sizes[self.sizes.index(nodes) :]:
            run = self.plan(size).run
            if run is None:
                continue
            if self.state(size) == "ok":
                return size
            cost = usd_of(run, self.goal.sure) or math.inf
            dearer = 0 if cost < cheapest else dearer + 1
            cheapest = min(cheapest, cost)
            if dearer >= _PATIENCE:
                break
        return None

    def attempts(self) -> tuple[Attempt, ...]:
        """Returns every size tried, the smallest first, with why it fails."""
        gpus = self.scenario.cluster.node.gpus
        rows = [self._attempt(n * gpus, self.tried[n], self.state(n)) for n in sorted(self.tried)]
        least = least_nodes(self.scenario, self.goal)
        if least > 1 and self.goal.deadline_s is not None:
            text = f"up to {plural((least - 1) * gpus, 'GPU')}"
            why = f"not in {show_seconds(self.goal.deadline_s)} even at the datasheet's peak"
            below = Attempt(value=(least - 1) * gpus, tried=text, holds=False, why=why)
            rows.insert(0, below)
        return tuple(rows)

    def _attempt(self, gpus: int, found: Planned, state: State) -> Attempt:
        run = found.run
        return Attempt(
            value=gpus,
            tried=plural(gpus, "GPU"),
            holds=state == "ok",
            why=self.why(found),
            days=None if run is None else run.days,
            usd=None if run is None else run.usd,
            missing_bytes=found.missing_bytes,
        )

    def why(self, found: Planned) -> str:
        """Returns in words what a size takes and what it lacks."""
        if found.result is None:
            return f"no plan is legal: {found.rules}"
        if found.run is None:
            lack = found.missing_bytes
            if not lack:
                return "no plan fits: host memory is missing"
            return f"no plan fits: the nearest lacks {show_bytes(lack)} a GPU"
        run, goal = found.run, self.goal
        seconds, cost = days_of(run, goal.sure) * DAY_S, usd_of(run, goal.sure)
        texts = [f"takes {show_seconds(seconds)}"]
        if goal.deadline_s is not None and self._late(run):
            texts.append(f"{show_seconds(seconds - goal.deadline_s)} too long")
        if cost is not None:
            texts.append(f"costs {show_usd(cost)}")
        if goal.budget_usd is not None and cost is not None and self._dear(run):
            texts.append(f"{show_usd(cost - goal.budget_usd)} too much")
        return ", ".join(texts)


def _last_up_to(sizes: Sequence[int], limit: int, least: int = 0) -> int:
    """Returns the index of the last size up to `limit`, but `least` at least."""
    return max(least, sum(n <= limit for n in sizes) - 1)


def _goal_text(goal: Goal) -> str:
    parts = []
    if goal.deadline_s is not None:
        parts.append(f"in {show_seconds(goal.deadline_s)}")
    if goal.budget_usd is not None:
        parts.append(f"for {show_usd(goal.budget_usd)}")
    return " and ".join(parts)


def _judged(scenario: Scenario, goal: Goal) -> tuple[str, ...]:
    end = "the high end" if goal.sure else "the middle"
    texts = [f"the goal is judged by {end} of the 80 % interval"]
    if not goal.every_size:
        texts.append(
            "sizes between those tried lie between them: more nodes hold more and are no slower"
        )
    most = sizes_of(scenario, goal)[-1] * scenario.cluster.node.gpus
    texts.append(f"clusters of up to {plural(most, 'GPU')} were looked at")
    if scenario.cluster.network is None:
        texts.append("the cluster names no network between nodes, so that it cannot grow")
    return tuple(texts)


def _found(hunt: _Hunt, nodes: int) -> Recommendation:
    found = hunt.plan(nodes)
    gpus = nodes * hunt.scenario.cluster.node.gpus
    assert found.run is not None
    interval = found.run.days_interval
    low, high = (show_seconds(d * DAY_S) for d in (interval.low, interval.high))
    return Recommendation(
        question="fewest_gpus",
        found=True,
        answer=f"{plural(gpus, 'GPU')} {_goal_text(hunt.goal)}: {hunt.why(found)}"
        f" (80 % interval {low} to {high})",
        value=gpus,
        attempts=hunt.attempts(),
        scenario=found.scenario,
        plan=found.best,
        run=found.run,
        binding=bound_by(found, hunt.means),
        assumptions=(*_judged(hunt.scenario, hunt.goal), *assumptions_of(found)),
    )


def _nothing(hunt: _Hunt) -> Recommendation:
    planned_rows = [(n, p) for n, p in hunt.tried.items() if p.result is not None]
    gpus = hunt.scenario.cluster.node.gpus
    if not planned_rows:
        missing = _nothing_planned(hunt)
    else:
        nodes, nearest = min(planned_rows, key=lambda row: _distance(hunt, *row))
        missing = f"the nearest is {plural(nodes * gpus, 'GPU')}: {hunt.why(nearest)}"
    return Recommendation(
        question="fewest_gpus",
        found=False,
        answer=f"no cluster of these nodes does it {_goal_text(hunt.goal)}",
        missing=missing,
        attempts=hunt.attempts(),
        assumptions=_judged(hunt.scenario, hunt.goal),
    )


def _nothing_planned(hunt: _Hunt) -> str:
    """Returns why no size was planned: none is legal, or the least at the peak is too large."""
    cluster = hunt.scenario.cluster
    least = least_nodes(hunt.scenario, hunt.goal) * cluster.node.gpus
    most = sizes_of(hunt.scenario, hunt.goal)[-1] * cluster.node.gpus
    if least <= most:
        return "no size has a legal plan"
    return (
        f"at the datasheet's peak it takes {plural(least, 'GPU')} at least, "
        f"{least - most:,} more than the {most:,} looked at"
    )


def _distance(hunt: _Hunt, nodes: int, found: Planned) -> tuple[int, float]:
    """Returns how far a size is from the goal: whether it fits, then by what factor it fails."""
    run, goal = found.run, hunt.goal
    if run is None:
        return 1, found.missing_bytes
    late = days_of(run, goal.sure) * DAY_S / goal.deadline_s if goal.deadline_s else 0.0
    cost = usd_of(run, goal.sure)
    dear = cost / goal.budget_usd if goal.budget_usd and cost is not None else 0.0
    return 0, max(late, dear)
