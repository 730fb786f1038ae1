"""The hunt for the smallest cluster that meets a goal: sizes planned, states, reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from flopwright.planner.recommend_answer import Attempt, Means, Planned, planned
from flopwright.planner.recommend_room import lacking, narrowed
from flopwright.planner.recommend_sizes import (
    DAY_S,
    Goal,
    days_of,
    least_nodes,
    show_usd,
    usd_of,
    with_nodes,
)
from flopwright.planner.space import Fixed
from flopwright.planner.whole_run import WholeRun
from flopwright.spec.scenario import Scenario
from flopwright.units import plural, show_bytes, show_seconds

# Larger clusters tried after one that is too dear, as long as they get cheaper.
_PATIENCE: Final = 2
# Sizes left out at first that are tried below the answer.
_LEFT_OUT_TRIED: Final = 4
# A step that kept fields make so much too long may be short enough with them free.
_NEARLY: Final = 1.5
# What a plan of another size keeps of the own size's best; layout and memory switches are free.
KEPT: Final = ("tp", "cp", "etp", "micro_batch_size", "zero_stage", "schedule")
State = Literal["ok", "small", "dear", "illegal"]


@dataclass(slots=True)
class Hunt:
    """The search over sizes in progress.

    Sizes are planned with what the scenario's own best plan keeps (KEPT), which is many times
    as fast; the answer and the sizes that could take its place are planned again with every
    axis free. A plan that keeps less is never slower, so what holds still holds.

    Attributes:
        every: numbers of nodes that could be planned, with the share of GPUs kept busy.
        sizes: those looked at first, sorted.
        kept: fields that plans of other sizes keep; {} plans every size with all axes.
        whole: sizes planned with every axis free.
    """

    scenario: Scenario
    goal: Goal
    means: Means
    every: dict[int, float]
    sizes: list[int]
    tried: dict[int, Planned] = field(default_factory=dict)
    kept: Fixed = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)

    def keep(self) -> None:
        """Plans the scenario's own size, whose best plan says what others keep."""
        best = self.plan_whole(self.scenario.cluster.num_nodes).best
        if best is not None:
            self.kept = {name: getattr(best.plan, name) for name in KEPT}

    def plan(self, nodes: int) -> Planned:
        """Returns the best plan on so many nodes; with every axis free where none is kept.

        Where none of those fits, the lightest plans tell whether any does.
        """
        if nodes in self.tried:
            return self.tried[nodes]
        if not self.kept:
            return self.plan_whole(nodes)
        self._say(nodes, "")
        scenario = with_nodes(self.scenario, nodes)
        freer = {name: value for name, value in self.kept.items() if name != "schedule"}
        for fixed in (self.kept, freer):
            if lacking(scenario, self.means, fixed).fits:
                self.tried[nodes] = planned(scenario, self.means, fixed)
                return self.tried[nodes]
        lack = lacking(narrowed(scenario, "lightest"), self.means)
        if lack.fits or lack.rules:
            return self.plan_whole(nodes)
        self.tried[nodes] = Planned(
            scenario=scenario, result=None, run=None, lacks_bytes=lack.missing_bytes
        )
        self.whole.add(nodes)
        return self.tried[nodes]

    def plan_whole(self, nodes: int) -> Planned:
        """Returns the best of all plans on so many nodes."""
        if nodes not in self.whole:
            self._say(nodes, ", every plan")
            self.tried[nodes] = planned(with_nodes(self.scenario, nodes), self.means)
            self.whole.add(nodes)
        return self.tried[nodes]

    def _say(self, nodes: int, how: str) -> None:
        gpus = plural(nodes * self.scenario.cluster.node.gpus, "GPU")
        self.means.say(f"planning {gpus}{how}")

    def settled(self, nodes: int | None) -> int | None:
        """Returns the answer once it and the size below it are planned with every axis.

        None stays only where the largest size fails so too.
        """
        if not self.sizes:
            return None
        if nodes is None:
            nodes = self.sizes[-1]
            self.plan_whole(nodes)
            if self.state(nodes) in ("small", "illegal"):
                return None
        for below in reversed([n for n in self.sizes if n < nodes]):
            self.plan(below)
            self.plan_whole(below)
            if self.state(below) == "small":
                break
            if self.state(below) != "illegal":
                nodes = below
        return nodes

    def state(self, nodes: int) -> State:
        """Returns whether a size meets the goal, and if not, on which side it fails."""
        found = self.plan(nodes)
        if found.result is None and found.lacks_bytes is None:
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

    def left_out_below(self, nodes: int | None) -> int | None:
        """Returns a smaller size that was left out and is not too small either, if there is one.

        Tried are the few that keep most GPUs busy, between the answer and what failed below it.
        """
        if nodes is None:
            return None
        failed = max((n for n in self.tried if n < nodes), default=nodes)
        between = [n for n in self.every if failed < n < nodes and n not in self.tried]
        busiest = sorted(between, key=lambda n: n * self.every[n])[-_LEFT_OUT_TRIED:]
        for size in sorted(busiest):
            if self._nearly(size):
                self.plan_whole(size)
            if self.state(size) in ("ok", "dear"):
                return size
        return nodes

    def _nearly(self, nodes: int) -> bool:
        """Returns whether a size that keeps fields is late by so little that free ones may do."""
        run, deadline = self.plan(nodes).run, self.goal.deadline_s
        if run is None or deadline is None or not self._late(run):
            return False
        return days_of(run, self.goal.sure) * DAY_S <= _NEARLY * deadline

    def all_below(self, nodes: int | None) -> int | None:
        """Returns the first of all sizes that is not too small, each of them planned."""
        least = least_nodes(self.scenario, self.goal)
        for size in (n for n in self.every if n >= least):
            if nodes is not None and size >= nodes:
                break
            if self.state(size) in ("ok", "dear"):
                return size
        return nodes

    def cheaper_above(self, nodes: int) -> int | None:
        """Returns the first larger size inside the budget; None once they get dearer."""
        cheapest, dearer = math.inf, 0
        for size in (n for n in self.sizes if n >= nodes):
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
        rows = [self._attempt(n, self.tried[n], self.state(n)) for n in sorted(self.tried)]
        least = least_nodes(self.scenario, self.goal)
        if least > 1 and self.goal.deadline_s is not None:
            text = f"up to {plural((least - 1) * gpus, 'GPU')}"
            why = f"not in {show_seconds(self.goal.deadline_s)} even at the datasheet's peak"
            below = Attempt(value=(least - 1) * gpus, tried=text, holds=False, why=why)
            rows.insert(0, below)
        return tuple(rows)

    def _attempt(self, nodes: int, found: Planned, state: State) -> Attempt:
        run, gpus = found.run, nodes * self.scenario.cluster.node.gpus
        return Attempt(
            value=gpus,
            tried=plural(gpus, "GPU"),
            holds=state == "ok",
            why=self.why(found),
            days=None if run is None else run.days,
            usd=None if run is None else run.usd,
            missing_bytes=found.missing_bytes,
            narrowed=nodes not in self.whole,
        )

    def why(self, found: Planned) -> str:
        """Returns in words what a size takes and what it lacks."""
        if found.result is None and found.lacks_bytes is None:
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
