"""A pipeline whose ranks share fewer cores than they are: who waits leaves its core to others.

Actions are priced as if all ranks worked side by side. While some wait for a message, the
others have more of the cores: with `a` ranks at work on K cores each runs at min(1, K / a) of
a core (processor sharing, as an operating system's fair scheduler gives it). So a pipeline's
bubbles cost less on shared cores than on its own; they cost nothing as long as K ranks work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from flopwright.ops import Array
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.training.candidates import Ints
from flopwright.simulator.training.durations import Durations
from flopwright.simulator.training.program import Op, Program
from flopwright.simulator.training.replay import Timeline
from flopwright.simulator.training.stages import PipelineCosts
from flopwright.spec.scenario import Scenario

_LEFT: Final = 1e-12  # of a second: nothing is left of an action


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCores:
    """Ranks on one node's cores.

    Attributes:
        cores: of the node; ranks: on the node, more than cores.
        ranks_per_stage: of a pipeline's stage, which work at the same time.
    """

    cores: int
    ranks: int
    ranks_per_stage: int

    def speed(self, stages_at_work: int) -> float:
        """Returns how much faster an action runs than with every rank at work."""
        ranks = max(stages_at_work * self.ranks_per_stage, 1)
        alone = self.ranks / self.cores
        return alone / max(1.0, ranks / self.cores)


def shared_cores(scenario: Scenario, plan: ParallelPlan) -> SharedCores | None:
    """Returns how a pipeline's ranks share cores; None where each has its own, or waits for none.

    Stages are taken to lie evenly over the nodes.
    """
    node = scenario.cluster.node
    ranks = min(plan.world_size, node.gpus)
    if node.gpu.kind != "cpu" or node.cores is None or ranks <= node.cores or plan.pp == 1:
        return None
    return SharedCores(cores=node.cores, ranks=ranks, ranks_per_stage=max(1, ranks // plan.pp))


def replay_shared(program: Program, durations: Durations, shared: SharedCores) -> Timeline:
    """Returns when every entry runs, (entries,); transfers take no core and their own time."""
    own, exchange = durations.parts(program)
    run = _Run(program, (own + exchange).tolist(), shared)
    return run.timeline(float(np.asarray(durations.norm_s)))


@dataclass(slots=True)
class _Run:
    """Stages on their way through their lists; `_end` is not a number until it is known."""

    program: Program
    seconds: list[float]
    shared: SharedCores
    _start: Array = field(init=False)
    _end: Array = field(init=False)
    _lists: list[list[int]] = field(init=False)
    _place: list[int] = field(init=False)
    _left: list[float] = field(init=False)
    _lanes: list[float] = field(init=False)
    _now: float = 0.0

    def __post_init__(self) -> None:
        count, stages = len(self.program.codes), self.program.num_stages
        self._start, self._end = np.zeros(count), np.full(count, math.nan)
        self._lists = [[] for _ in range(stages)]
        for i, code in enumerate(self.program.codes):
            self._lists[code.stage].append(i)
        self._place, self._left = [0] * stages, [-1.0] * stages
        self._lanes = [0.0] * len(self.program.lanes)

    def timeline(self, norm_s: float) -> Timeline:
        """Returns the times of every entry."""
        while True:
            soonest = self._advance()
            working = [s for s, left in enumerate(self._left) if left >= 0]
            if not working and soonest is None:
                break
            speed = self.shared.speed(len(working))
            least = min((self._left[s] / speed for s in working), default=math.inf)
            if soonest is not None:
                least = min(least, soonest - self._now)
            self._now += max(least, 0.0)
            for stage in working:
                self._left[stage] = max(self._left[stage] - least * speed, 0.0)
        self._steps(norm_s)
        return Timeline(self._start, self._end)

    def _advance(self) -> float | None:
        """Moves every stage as far as it goes now; returns the next arrival that is waited for."""
        moved, soonest = True, None
        while moved:
            moved, soonest = False, None
            for stage in range(self.program.num_stages):
                while (outcome := self._try(stage)) is True:
                    moved = True
                if isinstance(outcome, float):
                    soonest = outcome if soonest is None else min(soonest, outcome)
        return soonest

    def _try(self, stage: int) -> bool | float:
        """Moves a stage by one entry: True; or returns when it can, False where others decide."""
        if self._place[stage] >= len(self._lists[stage]):
            return False
        i = self._lists[stage][self._place[stage]]
        code = self.program.codes[i]
        if self._left[stage] >= 0:  # at work
            return self._left[stage] <= _LEFT and self._finish(stage, i)
        if code.op == Op.FIRST:
            return self._pass(stage, i, self._now, self._now)
        waits = [self._end[w] for w in self.program.waits(code)]
        if code.op == Op.STEP:
            ready = max((w for w in waits if not math.isnan(w)), default=self._now)
            return self._pass(stage, i, max(ready, self._now), math.nan)
        if any(math.isnan(w) for w in waits):
            return False
        ready = max([self._now, *waits])
        if code.op == Op.LANE:
            begin = max(ready, self._lanes[code.lane])
            end = begin + self.seconds[code.row]
            self._lanes[code.lane] = end
            return self._pass(stage, i, begin, end)
        if ready > self._now:
            return float(ready)
        if code.op == Op.RECEIVE:
            return self._pass(stage, i, self._since(stage), self._now)
        self._start[i], self._left[stage] = self._now, self.seconds[code.row]
        return self._left[stage] <= _LEFT and self._finish(stage, i)

    def _since(self, stage: int) -> float:
        """Returns when the stage came to where it stands."""
        place = self._place[stage]
        before = self._lists[stage][place - 1] if place else -1
        if before < 0 or self.program.codes[before].op == Op.LANE:
            return min(self._now, self._start[before]) if before >= 0 else 0.0
        return float(self._end[before])

    def _finish(self, stage: int, i: int) -> bool:
        self._left[stage] = -1.0
        partner = self.program.codes[i].partner
        if partner >= 0:
            self._start[partner], self._end[partner] = self._start[i], self._now
        return self._pass(stage, i, float(self._start[i]), self._now)

    def _pass(self, stage: int, i: int, start: float, end: float) -> bool:
        self._start[i], self._end[i] = start, end
        self._place[stage] += 1
        return True

    def _steps(self, norm_s: float) -> None:
        """Sets the optimizer steps: all begin once the last stage has come, the norm summed."""
        steps = self.program.steps
        together = max(float(self._start[i]) for i in steps) + norm_s
        for i in steps:
            self._start[i] = together
            self._end[i] = together + self.seconds[self.program.codes[i].row]


def shared_bound(
    scenario: Scenario, costs: PipelineCosts, m: Ints, step_s: Array, times: dict[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Returns the step and its classes, a bound of `replay_shared`, where cores are shared.

    A step takes at least what its ranks' work takes on all cores, and at least what it would
    take with a core for each rank.

    Args:
        m: micro-batches; step_s, times: from `step_times`, (C,), every rank at work all the time.
    """
    node, candidates = scenario.cluster.node, costs.candidates
    ranks = np.minimum(candidates.world_size, node.gpus)
    if node.gpu.kind != "cpu" or node.cores is None or costs.pp == 1:
        return step_s, times
    shares = ranks > node.cores
    if not shares.any():
        return step_s, times
    end, kinds = costs.end, costs.kinds
    work = costs.pick.by_stage(costs.micro.forward_s + costs.micro.backward_s)
    busy = m * kinds.spread(work) + end.reduce_s + end.tail_s
    bound = np.maximum(step_s * node.cores / ranks, busy.mean(axis=0))
    step = np.where(shares, np.minimum(bound, step_s), step_s)
    held = {k: v for k, v in times.items() if k not in {"idle", "pp_comm"}}
    total = np.asarray(sum(held.values()))
    scale = np.minimum(1.0, step / np.where(total > 0, total, 1.0))
    out = {k: v * np.where(shares, scale, 1.0) for k, v in held.items()}
    left = np.maximum(step - np.asarray(sum(out.values())), 0.0)
    out["pp_comm"] = np.minimum(times["pp_comm"], left)
    out["idle"] = left - out["pp_comm"]
    return np.asarray(step), out
