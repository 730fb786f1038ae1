"""Exact step times of the plans at the top: best first, until no other can be among them.

`evaluate` prices every candidate by a closed form that never exceeds the replay of the
lowered list. So candidates are replayed in the order of that bound, and the search may stop
as soon as enough layouts are known to be faster than the next bound (best-first branch and
bound): the ranking is then that of replaying every candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from flopwright.planner.ranking import (
    Floats,
    Ints,
    Priced,
    best_first,
    comfortable,
    layout_ids,
    objective_value,
    select,
)
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.blocks import price_blocks, shard_combos
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import group_costs, same_pipeline
from flopwright.simulator.training.predict import durations_of
from flopwright.simulator.training.program import program_of
from flopwright.simulator.training.replay import Durations
from flopwright.simulator.training.schedule_rules import reduces, reduces_by_chunk
from flopwright.simulator.training.shared_cores import replay_shared, shared_cores
from flopwright.simulator.training.stages import PipelineCosts
from flopwright.simulator.training.waves import many_step_seconds
from flopwright.spec.scenario import Scenario

# Replayed at once: few at first, as their lists have to be made.
BATCH: Final = 16
MAX_REPLAYS: Final = 2048
# The bound may exceed the replay by rounding, not by more.
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalists:
    """The replayed candidates.

    Attributes:
        index: candidates replayed; step_time_s their exact step times.
        proved: no other candidate can be among the best `layouts` layouts.
    """

    index: Ints
    step_time_s: Floats
    proved: bool


def replayed_step_times(
    scenario: Scenario, candidates: Candidates, calibration: Calibration | None = None
) -> Floats:
    """Returns the step time of each candidate from the replay of its lowered list, (C,).

    Candidates that run the same list (whatever their layers cost) are replayed together.
    """
    calibration = calibration or default_calibration(scenario.cluster.node.gpu)
    combos = shard_combos(candidates)
    blocks = price_blocks(scenario, combos, calibration)
    parts: dict[tuple[int, ...], list[tuple[Ints, PipelineCosts]]] = {}
    keys = _list_keys(candidates, scenario)
    for same in same_pipeline(candidates):
        for key in np.unique(keys[same], axis=0):
            index = same[(keys[same] == key).all(axis=1)]
            costs = group_costs(scenario, candidates, combos, blocks, calibration, index)
            parts.setdefault(tuple(int(k) for k in key), []).append((index, costs))
    out = np.zeros(len(candidates))
    for members in parts.values():
        index = np.concatenate([i for i, _ in members])
        plan = candidates.plan(int(index[0]))
        if shared_cores(scenario, plan) is not None:
            for places, costs in members:
                out[places] = _shared_step_times(scenario, candidates, costs, places)
            continue
        durations = _durations([c for _, c in members])
        out[index] = many_step_seconds(plan, durations, scenario.workload.global_batch_size)
    return out


def _shared_step_times(
    scenario: Scenario, candidates: Candidates, costs: PipelineCosts, places: Ints
) -> list[float]:
    """Returns the step times of candidates whose ranks share cores, one after the other."""
    out = []
    for column, place in enumerate(places):
        plan = candidates.plan(int(place))
        program = program_of(plan, plan.num_microbatches(scenario.workload.global_batch_size))
        shared = shared_cores(scenario, plan)
        assert shared is not None
        out.append(float(replay_shared(program, durations_of(costs, column), shared).step_time_s))
    return out


def _list_keys(candidates: Candidates, scenario: Scenario) -> Ints:
    """Returns what decides a candidate's list, as far as it takes time, (C, 6)."""
    c = candidates
    microbatches = c.num_microbatches(scenario.workload.global_batch_size)
    same = (c.schedule, c.pp, c.vpp, reduces(c), reduces_by_chunk(c), microbatches)
    return np.stack(same, axis=1)


def _durations(costs: list[PipelineCosts]) -> Durations:
    def joined(values: Callable[[PipelineCosts], Floats]) -> Floats:
        return np.concatenate([values(c) for c in costs], axis=-1)

    return Durations(
        forward_s=joined(lambda c: c.forward_s),
        backward_s=joined(lambda c: c.backward_s),
        send_s=joined(lambda c: c.send_s),
        reduce_s=joined(lambda c: c.end.reduce_s),
        step_s=joined(lambda c: c.end.tail_s),
        norm_s=joined(lambda c: np.asarray(c.end.norm_s)),
        weight_s=joined(lambda c: c.weight_s),
        recompute_s=joined(lambda c: _part(c, c.backward, "recompute")),
        forward_exchange_s=joined(lambda c: _part(c, c.forward, "ep_comm")),
        backward_exchange_s=joined(lambda c: _part(c, c.backward, "ep_comm")),
    )


def _part(costs: PipelineCosts, classes: Mapping[str, Floats], name: str) -> Floats:
    return classes[name] if name in classes else np.zeros_like(costs.send_s)


def finalists(
    priced: Priced, scenario: Scenario, layouts: int, calibration: Calibration | None = None
) -> Finalists:
    """Returns exact step times of enough candidates to know the best `layouts` layouts.

    Candidates with the asked headroom come first; those that only just fit follow where
    there are not enough of them.
    """
    cosy = comfortable(priced, scenario)
    hunt = _Hunt(priced, scenario, calibration, layout_ids(priced.candidates))
    for tier in (cosy, priced.fits & ~cosy):
        hunt.through(best_first(priced, scenario, np.flatnonzero(tier)), layouts)
    return Finalists(
        index=np.concatenate([np.zeros(0, np.int64), *hunt.index]),
        step_time_s=np.concatenate([np.zeros(0), *hunt.times]),
        proved=hunt.proved,
    )


@dataclass(slots=True)
class _Hunt:
    """The best-first search in progress; `settled` layouts were found in an earlier tier."""

    priced: Priced
    scenario: Scenario
    calibration: Calibration | None
    ids: Ints
    index: list[Ints] = field(default_factory=list)
    times: list[Floats] = field(default_factory=list)
    settled: set[int] = field(default_factory=set)
    proved: bool = True

    def through(self, tier: Iterator[Ints], layouts: int) -> None:
        """Replays candidates of a tier, best bound first, until `layouts` layouts are known."""
        best: dict[int, float] = {}
        need, size = layouts - len(self.settled), BATCH
        for part in tier:
            start = 0
            while start < len(part) and not self._enough(best, need, part[start]):
                left = MAX_REPLAYS - sum(map(len, self.index))
                if left <= 0:
                    self.proved = False
                    break
                self._replay(part[start : start + min(size, left)], best)
                start, size = start + min(size, left), 2 * size
            if start < len(part):
                break
        self.settled |= set(best)

    def _enough(self, best: dict[int, float], need: int, candidate: int) -> bool:
        """Returns whether no candidate from this one on can be among the `need` best layouts."""
        if need <= 0:
            return True
        known = sorted(best.values())
        bound = self._values(np.array([candidate]))[0]
        return len(known) >= need and known[need - 1] <= bound * (1 + _ROUNDING)

    def _replay(self, part: Ints, best: dict[int, float]) -> None:
        chosen = self.priced.candidates.take(part)
        exact = replayed_step_times(self.scenario, chosen, self.calibration)
        self.index.append(part)
        self.times.append(exact)
        for layout, value in zip(self.ids[part], self._values(part, exact), strict=True):
            if int(layout) not in self.settled:
                best[int(layout)] = min(float(value), best.get(int(layout), np.inf))

    def _values(self, index: Ints, exact: Floats | None = None) -> Floats:
        """Returns the objective at `index`, from exact times where given, else the bound."""
        return objective_value(select(self.priced, index, exact), self.scenario)
