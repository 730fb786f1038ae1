"""Exact step times of the plans at the top: best first, until no other can be among them.

`evaluate` prices every candidate by a closed form that never exceeds the replay of the
lowered list. So candidates are replayed in the order of that bound, and the search may stop
as soon as enough layouts are known to be faster than the next bound (best-first branch and
bound): the ranking is then that of replaying every candidate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from flopwright.planner.ranking import (
    Floats,
    Ints,
    Priced,
    comfortable,
    layout_ids,
    objective_value,
    order,
    select,
)
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.blocks import price_blocks, shard_combos
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import group_costs, same_pipeline
from flopwright.simulator.training.program import program_of
from flopwright.simulator.training.replay import Durations, replay
from flopwright.simulator.training.stages import PipelineCosts
from flopwright.spec.scenario import Scenario

BATCH: Final = 64
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
    keys = _program_keys(candidates, scenario)
    for same in same_pipeline(candidates):
        for key in np.unique(keys[same], axis=0):
            index = same[(keys[same] == key).all(axis=1)]
            costs = group_costs(scenario, candidates, combos, blocks, calibration, index)
            parts.setdefault(tuple(int(k) for k in key), []).append((index, costs))
    out = np.zeros(len(candidates))
    for key, members in parts.items():
        index = np.concatenate([i for i, _ in members])
        program = program_of(candidates.plan(int(index[0])), key[-1])
        out[index] = replay(program, _durations([c for _, c in members])).step_time_s
    return out


def _program_keys(candidates: Candidates, scenario: Scenario) -> Ints:
    """Returns what decides a candidate's lowered list, (C, 5), micro-batches last."""
    c = candidates
    reduces = (c.dp * c.cp > 1).astype(np.int64)
    microbatches = c.num_microbatches(scenario.workload.global_batch_size)
    return np.stack([c.schedule, c.pp, c.vpp, reduces, microbatches], axis=1)


def _durations(costs: list[PipelineCosts]) -> Durations:
    def joined(values: Callable[[PipelineCosts], Floats]) -> Floats:
        return np.concatenate([values(c) for c in costs], axis=-1)

    return Durations(
        forward_s=joined(lambda c: c.forward_s),
        backward_s=joined(lambda c: c.backward_s),
        send_s=joined(lambda c: c.send_s),
        reduce_s=joined(lambda c: c.end.reduce_s),
        step_s=joined(lambda c: c.end.update_s + c.end.offload_s + c.end.gather_s),
        norm_s=joined(lambda c: np.asarray(c.end.norm_s)),
    )


def finalists(
    priced: Priced, scenario: Scenario, layouts: int, calibration: Calibration | None = None
) -> Finalists:
    """Returns exact step times of enough candidates to know the best `layouts` layouts.

    Candidates with the asked headroom come first; those that only just fit follow where
    there are not enough of them.
    """
    ids, cosy = layout_ids(priced.candidates), comfortable(priced, scenario)
    ranks = order(priced, scenario)
    index: list[Ints] = []
    times: list[Floats] = []
    seen: set[int] = set()
    proved, budget = True, MAX_REPLAYS
    for tier in (ranks[cosy[ranks]], ranks[(priced.fits & ~cosy)[ranks]]):
        best: dict[int, float] = {}
        need = layouts - len(seen)
        start = 0
        while need > 0 and start < len(tier):
            bound = _value(priced, scenario, tier[start : start + 1], None)[0]
            known = sorted(v for k, v in best.items() if k not in seen)
            if len(known) >= need and known[need - 1] <= bound * (1 + _ROUNDING):
                break
            if budget <= 0:
                proved = False
                break
            part = tier[start : start + min(BATCH, budget)]
            exact = replayed_step_times(scenario, priced.candidates.take(part), calibration)
            for k, v in zip(ids[part], _value(priced, scenario, part, exact), strict=True):
                best[int(k)] = min(float(v), best.get(int(k), np.inf))
            index.append(part)
            times.append(exact)
            start += len(part)
            budget -= len(part)
        seen |= set(best)
    empty = np.zeros(0)
    return Finalists(
        index=np.concatenate(index) if index else empty.astype(np.int64),
        step_time_s=np.concatenate(times) if times else empty,
        proved=proved,
    )


def _value(priced: Priced, scenario: Scenario, index: Ints, exact: Floats | None) -> Floats:
    """Returns the objective of the candidates at `index`, from exact times where given."""
    return objective_value(select(priced, index, exact), scenario)
