"""Seconds of a layer's collectives, nothing hidden: what overlaps is decided a chunk at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from flopwright.ops import Array, Collective, CommTable, Phase
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.collectives.expert_exchange import ExpertCall
from flopwright.simulator.collectives.times import CollectiveTimes, collective_seconds
from flopwright.simulator.collectives.topology import GroupShape, group_shape
from flopwright.simulator.training.combos import ShardCombos
from flopwright.simulator.training.routing import busiest_over_mean
from flopwright.spec.scenario import Scenario

# Time class of the collectives of a layer, by group.
COMM_CLASSES: Final = {"tp": "tp_comm", "cp": "cp_comm", "ep": "ep_comm", "etp": "ep_comm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommSeconds:
    """Seconds of collectives.

    Attributes:
        cls: time class of each row; seconds: of all its calls, (rows, U).
        forward, backward: sums by class, (U,).
    """

    cls: tuple[str, ...]
    seconds: Array
    forward: dict[str, Array]
    backward: dict[str, Array]
    assumptions: tuple[str, ...]


def comm_seconds(
    scenario: Scenario, combos: ShardCombos, calibration: Calibration, table: CommTable
) -> CommSeconds:
    """Returns what every collective of one micro-batch takes."""
    cls = tuple(COMM_CLASSES[group] for group in table.group)
    seconds = np.zeros((len(table), len(combos)))
    notes: dict[str, None] = {}
    forward: dict[str, Array] = {}
    backward: dict[str, Array] = {}
    for row in range(len(table)):
        if not table.count[row].any():
            continue  # no combination has the group
        times = _row(scenario, combos, calibration, table, row)
        notes.update(dict.fromkeys(times.assumptions))
        waits = np.where(times.seconds > 0, calibration.call_s.get("sync", 0.0), 0.0)
        seconds[row] = (times.seconds + waits) * table.count[row]
        side = forward if Phase(table.phase[row]) is Phase.FORWARD else backward
        side[cls[row]] = side.get(cls[row], np.zeros(len(combos))) + seconds[row]
    return CommSeconds(
        cls=cls, seconds=seconds, forward=forward, backward=backward, assumptions=tuple(notes)
    )


def _row(
    scenario: Scenario,
    combos: ShardCombos,
    calibration: Calibration,
    table: CommTable,
    row: int,
) -> CollectiveTimes:
    collective, name = Collective(table.collective[row]), table.group[row]
    group = layer_group(name, combos, scenario)
    if collective is not Collective.ALL_TO_ALL or name != "ep":
        return collective_seconds(
            collective, table.bytes[row], group, scenario.cluster, calibration
        )
    moe, load = scenario.model.moe, scenario.workload.expert_load
    assert moe is not None
    tail = busiest_over_mean(moe, load, combos.ep)
    padded = load.kind == "capacity"  # every place is sent, filled or not
    forward = Phase(table.phase[row]) is Phase.FORWARD
    call: ExpertCall = "dispatch" if ("dispatch" in table.name[row]) == forward else "combine"
    nbytes = table.bytes[row] * (tail if padded else 1.0)
    skew = np.maximum(1.0 if padded else tail, 1.0)

    def exchange(node_limit: int | None) -> CollectiveTimes:
        copies = moe.top_k if scenario.cluster.node.gpu.kind != "cpu" else None
        return collective_seconds(
            collective, nbytes, group, scenario.cluster, calibration, copies,
            call=call, node_limit=node_limit, skew=skew,
        )  # fmt: skip

    free = exchange(None)
    if moe.num_groups == 1:
        return free
    # Tokens go to a few groups of experts; a group inside a node keeps to that node.
    limited = exchange(moe.top_k_groups)
    seconds = np.where(group.nodes <= moe.num_groups, limited.seconds, free.seconds)
    return CollectiveTimes(seconds, free.assumptions)


def layer_group(name: str, combos: ShardCombos, scenario: Scenario) -> GroupShape:
    """Returns how a layer's group lies on the nodes (rank order of plan/mesh.py)."""
    one = np.ones(len(combos))
    size, stride = {
        "tp": (combos.tp, one),
        "cp": (combos.cp, combos.tp),
        "ep": (combos.ep, combos.etp),
        "etp": (combos.etp, one),
    }[name]
    return group_shape(size, stride, scenario.cluster.node.domain_gpus)
