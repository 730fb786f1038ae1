"""How full each stage's rank is through a step, from the same list of actions.

Weights, gradients, optimizer state and what the driver keeps stand still; activations come
with each forward and go with the backward (the weight gradient, where that is apart) or the
copy to the host; a backward holds for its time what simulator/memory calls temporaries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwright.models.temporaries.cost import backward_moments
from flopwright.ops import Array, ShardShape
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.plan.schedules.placement import chunks_of_stage
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.memory.stages import FP8_BYTES_PER_NUMBER
from flopwright.simulator.training.evaluate import memory_of
from flopwright.simulator.training.layers import kind_of
from flopwright.simulator.training.program import Program
from flopwright.simulator.training.stages import PipelineCosts
from flopwright.simulator.training.trace import RankTimes
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.parameters import EMBEDDING_LAYER
from flopwright.spec.scenario import Scenario

_BACKWARDS = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One stage's rank through a step.

    Attributes:
        times_s: when its memory changes; activations, temporaries: bytes from then on.
        fixed_bytes: by the classes that stand still (report/metrics.py).
        peak_bytes: the most it holds, at peak_s, while `peak_action` begins.
        peak_operator: the fullest moment of that action's backward; "" in a forward.
    """

    stage: int
    times_s: Array
    activations: Array
    temporaries: Array
    fixed_bytes: dict[str, int]
    peak_bytes: int
    peak_s: float
    peak_action: str
    peak_operator: str


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Bytes of one micro-batch by chunk: what stays, what an offload moves, the backward's."""

    stays: Array
    moves: Array
    backward: Array
    reduction: Array  # by stage


def memory_timelines(
    scenario: Scenario,
    plan: ParallelPlan,
    calibration: Calibration,
    costs: PipelineCosts,
    program: Program,
    times: RankTimes,
) -> tuple[RankMemory, ...]:
    """Returns the memory of every stage's rank through the step that `times` are of."""
    memory = memory_of(scenario, costs, calibration)
    fixed = {
        name: values[:, 0]
        for name, values in memory.classes.items()
        if name not in {"activations", "temporaries"}
    }
    temporaries = memory.classes["temporaries"][:, 0]
    nbytes = _bytes(scenario, plan, calibration, costs, temporaries)
    out = []
    for stage in range(program.num_stages):
        changes = _changes(program, times, plan, stage, nbytes)
        mine = {name: int(values[stage]) for name, values in fixed.items()}
        out.append(_timeline(scenario, plan, stage, changes, mine))
    return tuple(out)


def _bytes(
    scenario: Scenario,
    plan: ParallelPlan,
    calibration: Calibration,
    costs: PipelineCosts,
    temporaries: Array,
) -> _Bytes:
    factor = calibration.memory_factors.get
    other, fp8 = costs.saved_bytes[:, 0], costs.saved_fp8_bytes[:, 0]
    width = DTYPE_BYTES[scenario.workload.precision.compute]
    if plan.fp8_activations:
        fp8 = fp8 * FP8_BYTES_PER_NUMBER / width
    moves = 0 * other
    if plan.activation_offload:
        moves = other + (0 * fp8 if plan.fp8_activations else fp8)
    kept = factor("activations", 1.0)
    backward = costs.backward_bytes[:, 0] * factor("temporaries", 1.0)
    fullest = np.array([backward[list(chunks_of_stage(plan, s))].max() for s in range(plan.pp)])
    reduction = np.where(temporaries > fullest + 1, temporaries, 0.0)
    return _Bytes((other + fp8 - moves) * kept, moves * kept, backward, reduction)


# When, in which order at one time, what becomes of activations and temporaries, and why.
_Change = tuple[float, int, float, float, Action]


def _changes(
    program: Program, times: RankTimes, plan: ParallelPlan, stage: int, nbytes: _Bytes
) -> list[_Change]:
    """Returns the changes of a stage's memory; what ends at a time goes before what begins."""
    out: list[_Change] = []
    split = {e.action.kind for e in program.entries} & {ActionKind.BACKWARD_WEIGHT}
    again = plan.recompute != "none"
    for i, (where, action) in enumerate(program.entries):
        if where != stage:
            continue
        begin, end = float(times.start_s[i]), float(times.end_s[i])
        first, last = 2 * program.codes[i].place, 2 * program.codes[i].place + 1
        kind, chunk = action.kind, action.chunk
        if kind is ActionKind.FORWARD:
            out.append((begin, first, nbytes.stays[chunk] + nbytes.moves[chunk], 0.0, action))
        elif kind is ActionKind.OFFLOAD:
            out.append((end, first, -nbytes.moves[chunk], 0.0, action))
        elif kind is ActionKind.FETCH:
            out.append((begin, first, nbytes.moves[chunk], 0.0, action))
        elif kind is ActionKind.RECOMPUTE:
            out.append((begin, first, 0.0, nbytes.backward[chunk], action))
        elif kind is ActionKind.REDUCE_GRADIENTS and chunk < 0:
            out.append((begin, first, 0.0, nbytes.reduction[stage], action))
            out.append((end, last, 0.0, -nbytes.reduction[stage], action))
        if kind in _BACKWARDS:
            if not again:
                out.append((begin, first, 0.0, nbytes.backward[chunk], action))
            out.append((end, last, 0.0, -nbytes.backward[chunk], action))
        if kind is ActionKind.BACKWARD_WEIGHT or (
            kind in _BACKWARDS and (kind is ActionKind.BACKWARD or not split)
        ):
            out.append((end, last, -nbytes.stays[chunk] - nbytes.moves[chunk], 0.0, action))
    return sorted(out, key=lambda c: c[:2])


def _timeline(
    scenario: Scenario,
    plan: ParallelPlan,
    stage: int,
    changes: list[_Change],
    fixed: dict[str, int],
) -> RankMemory:
    activations = np.cumsum([c[2] for c in changes])
    temporaries = np.cumsum([c[3] for c in changes])
    at = int(np.argmax(np.rint(activations + temporaries)))
    action = changes[at][4]
    peak = float(activations[at] + temporaries[at])
    return RankMemory(
        stage=stage,
        times_s=np.array([c[0] for c in changes]),
        activations=activations,
        temporaries=temporaries,
        fixed_bytes=fixed,
        peak_bytes=round(peak) + sum(fixed.values()),
        peak_s=changes[at][0],
        peak_action=str(action),
        peak_operator=_operator(scenario, plan, action),
    )


def _operator(scenario: Scenario, plan: ParallelPlan, action: Action) -> str:
    """Returns the layer and operator whose backward holds most, of the action's chunk."""
    if action.kind not in {*_BACKWARDS, ActionKind.RECOMPUTE}:
        return ""
    model, workload = scenario.model, scenario.workload
    layers = list(plan.chunk_layers(model.num_layers)[action.chunk])
    if action.chunk == 0:
        layers.insert(0, EMBEDDING_LAYER)
    if action.chunk == plan.num_chunks - 1:
        layers.append(model.num_layers)
    shape = ShardShape(
        micro_batch_size=plan.micro_batch_size,
        seq_len=workload.seq_len,
        tp=plan.tp,
        ep=plan.ep,
        cp=plan.cp,
        fused_loss=plan.fused_loss,
        dtype=workload.precision.compute,
    )
    kinds: dict[str, int] = {}
    for layer in layers:
        kinds.setdefault(kind_of(model, layer), layer)
    best, found = -1.0, ""
    for layer in kinds.values():
        moments = backward_moments(model, layer, shape)
        row = int(np.argmax(moments.bytes[:, 0]))
        if moments.bytes[row, 0] > best:
            best, found = float(moments.bytes[row, 0]), f"layer {layer} {moments.name[row]}"
    return found.replace(f"layer {EMBEDDING_LAYER} ", "").replace(f"layer {model.num_layers} ", "")
