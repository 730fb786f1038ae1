"""A choice made complete: the round in numbers, the split of the update, every byte's place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from flopwright.errors import InputError, Violation
from flopwright.plan.loop import Budget, GenerationPlan, HandOver, PhaseName, UpdatePlan, Who
from flopwright.planner.rollouts.bounds import Work, most_per_s
from flopwright.planner.rollouts.choices import Choice
from flopwright.planner.rollouts.engines import Served
from flopwright.planner.rollouts.streamed import streamed_violations
from flopwright.planner.rollouts.updates import UpdateOption
from flopwright.simulator.rollouts.weight_sync import switch_seconds
from flopwright.spec.loop import LoopScenario, Place
from flopwright.spec.rollout import RolloutScenario
from flopwright.spec.rollouts.engine import HostPool
from flopwright.spec.rollouts.policy import Throttle
from flopwright.spec.rollouts.scenario import Switch, Update, WeightSync

PIPELINED: Final = ("one_step_off", "async")
_WIRE: Final = 0.8  # share of the host link's paper rate that caches move at


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One choice, ready to be simulated.

    Attributes:
        scenario: the round; None where the choice breaks a rule before it runs.
        most: the most attempts a second it can reach; 0 without a round.
        least_staleness: the least mean of versions behind that it can have.
        memory: what lies where; violations: what it breaks.
    """

    choice: Choice
    scenario: RolloutScenario | None
    update: UpdateOption
    hand_over: HandOver
    memory: tuple[Budget, ...]
    violations: tuple[Violation, ...]
    most: float
    least_staleness: float = 0.0

    @property
    def generation_plan(self) -> GenerationPlan:
        """The generating side as it stands in a plan file."""
        c = self.choice
        plan = GenerationPlan(
            gpus=c.generation_gpus,
            instances=c.instances,
            gpus_per_instance=c.gpus_per_instance,
            tp=c.tp,
            ep=c.ep,
            slots_per_instance=c.slots or None,
            stop_fraction=c.stop_fraction,
            throttled=c.throttled,
        )
        return plan.model_copy(update={"host_pool_bytes": c.host_pool_bytes})

    @property
    def update_plan(self) -> UpdatePlan:
        """The training side as it stands in a plan file."""
        return UpdatePlan(gpus=self.update.gpus, parallel=self.update.parallel)


def update_gpus(loop: LoopScenario, choice: Choice) -> int:
    """Returns the GPUs that train: all of a co-located loop, else those that do not generate."""
    if choice.layout == "colocated":
        return choice.generation_gpus
    return loop.num_gpus - choice.generation_gpus


def candidate(
    loop: LoopScenario,
    choice: Choice,
    served: Served | None,
    update: UpdateOption,
    rounds: int,
    work: Work,
) -> Candidate:
    """Returns a choice with its round, its memory and what it breaks.

    Args:
        served: the engine of its instances; None where the scenario gives it in numbers.
        rounds: that a simulation of it will keep.
        work: of the mean attempt, which no choice changes.
    """
    hand_over = _hand_over(loop, choice, served, update)
    memory = _memory(loop, choice, served, update)
    broken = [v for v in (budget.violation() for budget in memory) if v is not None]
    scenario = None
    try:
        scenario = _round(loop, choice, served, update, hand_over)
    except ValidationError as error:
        broken += [
            Violation(
                field=".".join(map(str, detail["loc"])) or "rollout",
                rule=detail["msg"].removeprefix("Value error, "),
                nearest_fix="more GPUs an instance, or shorter contexts",
            )
            for detail in error.errors()
        ]
    except InputError as error:
        broken += error.violations
    least = least_staleness(choice, scenario)
    broken += _goals(loop, choice, least)
    if choice.layout == "async" and scenario is not None:
        broken += streamed_violations(scenario)
    most = 0.0
    if scenario is not None:
        most = most_per_s(scenario, work, rounds, overlapped=choice.layout in PIPELINED)
    return Candidate(
        choice=choice,
        scenario=scenario,
        update=update,
        hand_over=hand_over,
        memory=memory,
        violations=tuple(broken),
        most=most,
        least_staleness=least,
    )


def least_staleness(choice: Choice, scenario: RolloutScenario | None) -> float:
    """Returns the least mean of policy versions behind that a choice can have.

    1 / lambda - 1 by Little's law where every attempt in flight decodes. One that waits for a
    place has no token yet and is no version behind, so where attempts may have to wait nothing
    is known but that the next batch is generated before the last one is trained on. An
    asynchronous loop may also be fresh: it waits for data.
    """
    if choice.layout == "async":
        return 0.0
    later = 1.0 if choice.layout == "one_step_off" else 0.0
    if scenario is None or _may_wait(scenario):
        return later
    return 1 / scenario.fraction - 1 + later


def _may_wait(scenario: RolloutScenario) -> bool:
    share = -(-scenario.num_attempts // scenario.instances)
    engine = scenario.engine
    limits = [scenario.slots_per_instance, scenario.schedule.concurrency]
    limits.append(None if engine is None else engine.running_limit)
    if any(limit is not None and limit < share for limit in limits):
        return True
    if scenario.stop.rule != "lambda" or scenario.staleness.rule != "none":
        return True
    capacity, longest = scenario.kv_capacity_tokens, scenario.longest_context
    if capacity is None or longest is None:
        return capacity is not None
    each = longest if engine is None else engine.attempt_tokens(longest)
    return each * share > capacity


def _goals(loop: LoopScenario, choice: Choice, least: float) -> list[Violation]:
    """Returns what is known to break the goal of staleness before anything is simulated."""
    bound = loop.rollout.goals.max_mean_staleness
    if bound is None or least <= bound + 1e-9:
        return []
    return [staleness_violation(choice, least, bound)]


def staleness_violation(choice: Choice, found: float, bound: float) -> Violation:
    """Returns that a choice's attempts are too many versions behind."""
    own = 1.0 if choice.layout == "one_step_off" else 0.0
    fix = "trains before it generates again: layout colocated or disaggregated"
    if choice.layout == "async":
        fix = "a smaller staleness bound"
    elif bound >= own:
        fix = f"lambda at least {1 / (1 + bound - own):.3g}"
    return Violation(
        field="goals.max_mean_staleness",
        value=f"{found:.3g} versions",
        rule="attempts must not be more versions behind on average",
        limit=f"{bound:g}",
        nearest_fix=fix,
    )


def _round(
    loop: LoopScenario,
    choice: Choice,
    served: Served | None,
    update: UpdateOption,
    hand_over: HandOver,
) -> RolloutScenario:
    """Returns the round of a choice, validated as if it stood in a file."""
    rollout = loop.rollout
    fields = {name: getattr(rollout, name) for name in RolloutScenario.model_fields}
    fields |= {
        "name": loop.name,
        "instances": choice.instances,
        "gpus_per_instance": choice.gpus_per_instance,
        "slots_per_instance": choice.slots or None,
        "update": Update().model_copy(
            update={"fixed_s": update.fixed_s, "per_token_s": update.per_token_s}
        ),
        "switch": Switch().model_copy(
            update={
                "to_update_s": hand_over.to_update_s,
                "to_generation_s": hand_over.to_generation_s,
            }
        ),
    }
    if rollout.stop.rule == "lambda":
        fields["stop_fraction"] = choice.stop_fraction
    if served is not None:
        fields |= {"engine": served.engine_beside(_resident(choice, update)), "decode": None}
        sync = WeightSync().model_copy(update={"fixed_s": hand_over.weight_sync_s})
        fields |= {"prefill": None, "weight_sync": sync}
    fields["throttle"] = (rollout.throttle or Throttle()) if choice.throttled else None
    fields["kv"] = _caches(loop, choice, served)
    return RolloutScenario(**fields)


def _resident(choice: Choice, update: UpdateOption) -> int:
    """Returns bytes of a GPU that training states keep from the caches."""
    return update.state_bytes if choice.layout == "colocated" and choice.states == "hbm" else 0


def _caches(loop: LoopScenario, choice: Choice, served: Served | None) -> object:
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


def _hand_over(
    loop: LoopScenario, choice: Choice, served: Served | None, update: UpdateOption
) -> HandOver:
    """Returns the times between the phases: states out and in, engines awake, weights there."""
    rollout = loop.rollout
    sync_s = rollout.weight_sync.seconds
    if served is not None:
        sync_s = served.sync_s(choice, update.gpus) + rollout.weight_sync.fixed_s
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


def _memory(
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
        resident = _resident(choice, update)
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
