"""Where every byte of a loop lies in both phases, and the times between the phases."""

from __future__ import annotations

from typing import Final

from flopwright.plan.loop import Budget, HandOver, PhaseName, Who
from flopwright.planner.rollouts.choices import Choice
from flopwright.planner.rollouts.engines import Served
from flopwright.planner.rollouts.updates import UpdateOption
from flopwright.simulator.rollouts.weight_sync import switch_seconds
from flopwright.spec.loop import LoopScenario, Place
from flopwright.spec.rollouts.engine import HostPool

_WIRE: Final = 0.8  # share of the host link's paper rate that caches move at


def resident_bytes(choice: Choice, update: UpdateOption) -> int:
    """Returns bytes of a GPU that training states keep from the caches."""
    return update.state_bytes if choice.layout == "colocated" and choice.states == "hbm" else 0


def caches(loop: LoopScenario, choice: Choice, served: Served | None) -> object:
    """Returns the round's caches with the pool of the choice."""
    kv = loop.rollout.kv
    per_token = kv.per_token_bytes
    if served is not None:
        per_token = round(served.engine.kv_bytes_per_token)
    capacity = None if served is not None else kv.capacity_bytes
    changed: dict[str, object] = {"per_token_bytes": per_token, "capacity_bytes": capacity}
    if loop.cluster is None:
        return kv.model_copy(update=changed)
    node = loop.cluster.node
    if not choice.host_pool_bytes or node.host_link is None:
        gone = {"host": None, "nvme": None, "preemption": "recompute"}
        return kv.model_copy(update={**changed, **gone, "on_update": choice.on_update})
    share = choice.gpus_per_instance / node.gpus
    host = HostPool.model_construct(
        size_bytes=int(choice.host_pool_bytes * share),
        bytes_per_s=node.host_link.bytes_per_s * _WIRE * choice.gpus_per_instance,
    )
    return kv.model_copy(update={**changed, "host": host, "on_update": choice.on_update})


def hand_over_of(
    loop: LoopScenario, choice: Choice, served: Served | None, update: UpdateOption
) -> HandOver:
    """Returns the times between the phases: states out and in, engines awake, weights there."""
    rollout = loop.rollout
    sync_s = rollout.weight_sync.seconds
    if served is not None:
        sync_s = served.sync_s(choice, update.gpus) + rollout.weight_sync.fixed_s
    if choice.elastic:
        return _lent(loop, choice, update, sync_s)
    if choice.layout != "colocated":
        return HandOver().model_copy(update={"weight_sync_s": sync_s})
    move_s = _move_s(loop, choice.states, update.state_bytes)
    given = rollout.switch
    return HandOver(
        states=choice.states, engine="dropped" if loop.serve is not None else "kept"
    ).model_copy(
        update={
            "to_update_s": given.to_update_s + move_s,
            "to_generation_s": given.to_generation_s + move_s,
            "weight_sync_s": sync_s,
        }
    )


def _lent(loop: LoopScenario, choice: Choice, update: UpdateOption, sync_s: float) -> HandOver:
    """Returns the hand-over of a loop whose trainer is lent: its states go to the host and back.

    The weights that it generates with reach its engines as they reach all others.
    """
    move_s = _move_s(loop, "dram", update.state_bytes)
    whole = update.gpus // choice.gpus_per_instance * choice.gpus_per_instance
    return HandOver(states="dram").model_copy(
        update={
            "weight_sync_s": sync_s,
            "lent_gpus": whole,
            "lend_s": loop.elastic.start_s + move_s + sync_s,
            "give_back_s": loop.elastic.stop_s + move_s,
            "lent_below": loop.elastic.below,
        }
    )


def _move_s(loop: LoopScenario, place: Place, state_bytes: int) -> float:
    """Returns the seconds in which a GPU's training states move one way."""
    if place == "hbm" or not state_bytes or loop.cluster is None:
        return 0.0
    out_s = switch_seconds(state_bytes, loop.cluster)
    if place == "dram":
        return out_s
    node = loop.cluster.node
    each = loop.hosts.nvme_bytes_per_s / node.gpus
    if node.nvme is not None:
        each = node.nvme.bytes_per_s
    return max(out_s, state_bytes / each)


def memory_of(
    loop: LoopScenario, choice: Choice, served: Served | None, update: UpdateOption
) -> tuple[Budget, ...]:
    """Returns every place in both phases; nothing where no cluster says what there is."""
    if loop.cluster is None:
        return ()
    node = loop.cluster.node
    colocated = choice.layout == "colocated"
    each = min(node.gpus, loop.num_gpus)
    hbm, dram, disk = node.gpu.hbm_bytes, node.host_bytes, loop.hosts.nvme_bytes
    held = loop.train.held_bytes if loop.train is not None else 0
    nodes = max(1, loop.num_gpus // node.gpus)
    both = {"system": loop.hosts.reserved_bytes, "other models": -(-held // nodes)}
    states = {"training states": update.state_bytes} if colocated else {}
    pool = {"kv_pool": choice.host_pool_bytes}
    who: Who = "all" if colocated else "generation"
    trains: Who = "all" if colocated else "update"
    found = []
    if served is not None:
        resident = resident_bytes(choice, update)
        here = served.memory(resident)
        here |= {"training states": resident} if resident else {}
        found.append(_budget("hbm", "generation", who, here, hbm))
    if loop.train is not None and update.peak_bytes:
        found.append(_budget("hbm", "update", trains, {"training": update.peak_bytes}, hbm))
    on_host = {n: b * each for n, b in states.items()} if choice.states == "dram" else {}
    offloaded = {"offloaded by the split": update.host_bytes}
    stays = {"states offloaded by the split": update.host_states_bytes}
    waits = stays if colocated and choice.states != "nvme" else {}
    found.append(_budget("dram", "generation", who, {**both, **pool, **on_host, **waits}, dram))
    parked = pool if colocated and choice.on_update == "park" else {}
    found.append(_budget("dram", "update", trains, {**both, **parked, **offloaded}, dram))
    if choice.elastic:
        moved = {"training states": update.state_bytes * each, **stays}
        found.append(_budget("dram", "generation", "update", {**both, **moved}, dram))
    if colocated and choice.states == "nvme":
        on_disk = {n: b * each for n, b in states.items()}
        on_disk |= stays
        found.append(_budget("nvme", "generation", "all", on_disk, disk))
    return tuple(found)


def _budget(
    place: Place, phase: PhaseName, gpus: Who, holds: dict[str, int], limit: int
) -> Budget:
    return Budget.model_construct(
        place=place,
        phase=phase,
        gpus=gpus,
        holds={name: int(size) for name, size in holds.items() if size},
        limit_bytes=int(limit),
    )
