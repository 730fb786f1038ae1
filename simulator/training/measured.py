"""A step made of measured actions: how long each action of a run took, replayed.

A real rank does more than its list says: it starts sends, takes messages out of buffers and
goes from one action to the next. That time is counted to the next action that computes; what
a receive waits for its sender is counted to none, and comes back in the replay from what its
partner does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

import numpy as np

from flopwright.ops import Array
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.simulator.training.durations import Disturbance, Durations
from flopwright.simulator.training.program import Op, Program
from flopwright.simulator.training.replay import replay_step_seconds

# One rank's step: when each action began and ended on a clock that all ranks share.
RankStep = Mapping[str, tuple[float, float]]
Step = Sequence[Sequence[RankStep]]  # by stage and data-parallel replica

# The action inside the optimizer's in which every rank waits for all others.
NORM: Final = "clip_norm"
_SENT: Final = {
    ActionKind.RECV_FORWARD: (ActionKind.SEND_FORWARD, -1),
    ActionKind.RECV_BACKWARD: (ActionKind.SEND_BACKWARD, 1),
}
_SENDS: Final = {kind for kind, _ in _SENT.values()}


def replayed_step_seconds(program: Program, steps: Sequence[Step]) -> Array:
    """Returns the seconds (steps,) that the replay gives steps of the measured actions.

    Args:
        program: of the plan that ran.
        steps: every rank's actions of each step; "" holds the step's own begin and end.
    """
    found = [_step_parts(program, step, _transfer_seconds(program, steps)) for step in steps]
    base = _base(program, steps)
    own, _ = base.parts(program)
    factors = []
    for stage in range(program.num_stages):
        seconds = np.array([seconds[stage] for seconds in found])  # [steps, replicas, places]
        rows = np.array([c.row for c in program.codes if c.stage == stage])
        unit = np.where(rows < 0, 1.0, own[np.maximum(rows, 0)])
        pairs = [c for c in program.codes if c.stage == stage and c.op == Op.SECOND]
        for code in pairs:
            first, second = program.pairs[code.row - program.num_rows]
            unit[program.codes[code.partner].place], unit[code.place] = own[first], own[second]
        factors.append(np.moveaxis(seconds / unit, -1, 0))
    replicas = len(steps[0][0])
    links = np.ones((program.num_stages, replicas))
    return replay_step_seconds(program, base, Disturbance(factors=tuple(factors), links=links))


def _base(program: Program, steps: Sequence[Step]) -> Durations:
    """Returns durations of 1 for what has factors, and measured ones for what has none."""
    chunks = np.ones(program.num_chunks)
    reduce = [
        np.mean([_reduction_seconds(step[stage]) for step in steps])
        for stage in range(program.num_stages)
    ]
    return Durations(
        forward_s=chunks,
        backward_s=chunks,
        weight_s=chunks / 2,
        recompute_s=chunks / 4,
        send_s=chunks * _transfer_seconds(program, steps),
        reduce_s=np.array(reduce),
        step_s=np.ones(program.num_stages),
    )


def _reduction_seconds(ranks: Sequence[RankStep]) -> float:
    """Returns how long a stage's replicas reduce once the last of them has come."""
    name = str(Action(ActionKind.REDUCE_GRADIENTS))
    if name not in ranks[0]:
        return 0.0
    begin = max(rank[name][0] for rank in ranks)
    return max(0.0, max(rank[name][1] for rank in ranks) - begin)


def _messages(program: Program, stage: int) -> list[tuple[str, str, int]]:
    """Returns (receive, its send, the sender's stage) of what a stage receives."""
    out = []
    for code, action in zip(program.codes, program.actions, strict=True):
        if code.stage == stage and action.kind in _SENT:
            kind, shift = _SENT[action.kind]
            sent = Action(kind, action.chunk + shift, action.microbatch)
            out.append((str(action), str(sent), action.peer))
    return out


def _transfer_seconds(program: Program, steps: Sequence[Step]) -> float:
    """Returns how long a message takes: the median of those that were waited for."""
    found = []
    for step in steps:
        for stage, ranks in enumerate(step):
            for receive, send, peer in _messages(program, stage):
                for replica, rank in enumerate(ranks):
                    begin, end = rank[receive]
                    sent = step[peer][replica][send][0]
                    if sent > begin:
                        found.append(end - sent)
    return median(found) if found else 0.0


def _step_parts(program: Program, step: Step, transfer_s: float) -> list[list[list[float]]]:
    """Returns the seconds of every entry, by stage, replica and place in the stage's list."""
    norm = [r[NORM][0] for ranks in step for r in ranks if NORM in r]
    last = max(norm, default=0.0)
    out = []
    for stage, ranks in enumerate(step):
        actions = [
            a for c, a in zip(program.codes, program.actions, strict=True) if c.stage == stage
        ]
        sent = {receive: (send, peer) for receive, send, peer in _messages(program, stage)}
        rows = []
        for replica, rank in enumerate(ranks):
            arrivals = {
                receive: step[peer][replica][send][0] + transfer_s
                for receive, (send, peer) in sent.items()
            }
            rows.append(_rank_parts(actions, rank, arrivals, last))
        out.append(rows)
    return out


def _rank_parts(
    actions: Sequence[Action], rank: RankStep, arrivals: Mapping[str, float], last_norm: float
) -> list[float]:
    """Returns the seconds of one rank's entries; receives, sends and reductions get none."""
    seconds = [0.0] * len(actions)
    begins = [rank[str(a)][0] for a in actions]
    carried = begins[0] - rank[""][0]
    for i, action in enumerate(actions):
        begin, end = rank[str(action)]
        until = begins[i + 1] if i + 1 < len(actions) else rank[""][1]
        if action.kind in _SENT:
            waited = min(max(0.0, arrivals[str(action)] - begin), end - begin)
            carried += until - begin - waited
        elif action.kind is ActionKind.REDUCE_GRADIENTS:
            carried += until - end
        elif action.kind in _SENDS:
            carried += until - begin
        else:
            own = until - begin + carried
            if action.kind is ActionKind.OPTIMIZER_STEP and NORM in rank:
                own -= max(0.0, last_norm - rank[NORM][0])
            seconds[i], carried = own, 0.0
    return seconds
