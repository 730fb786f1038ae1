"""A choice made complete: the round in numbers, the split of the update, every byte's place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from flopwright.errors import InputError, Violation
from flopwright.plan.loop import Budget, GenerationPlan, HandOver, UpdatePlan
from flopwright.planner.rollouts.bounds import Work, most_per_s
from flopwright.planner.rollouts.choices import Choice
from flopwright.planner.rollouts.engines import Served
from flopwright.planner.rollouts.places import caches, hand_over_of, memory_of, resident_bytes
from flopwright.planner.rollouts.updates import UpdateOption
from flopwright.simulator.rollouts.streaming import in_flight
from flopwright.spec.loop import LoopScenario
from flopwright.spec.rollout import RolloutScenario
from flopwright.spec.rollouts.policy import Throttle
from flopwright.spec.rollouts.scenario import Switch, Update, WeightSync

PIPELINED: Final = ("one_step_off", "async")


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
    hand_over = hand_over_of(loop, choice, served, update)
    memory = memory_of(loop, choice, served, update)
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
    most = 0.0
    if scenario is not None:
        try:
            most = _most(choice, scenario, hand_over, work, rounds)
        except InputError as error:
            broken += error.violations
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


def _most(
    choice: Choice, scenario: RolloutScenario, over: HandOver, work: Work, rounds: int
) -> float:
    """Returns the most attempts a second that a choice can reach."""
    if choice.layout == "async":
        assert choice.staleness_bound is not None
        lent = over.lent_gpus // choice.gpus_per_instance
        wider = {"instances": scenario.instances + lent}
        scenario = in_flight(scenario, choice.staleness_bound).model_copy(update=wider)
    return most_per_s(scenario, work, rounds, overlapped=choice.layout in PIPELINED)


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
        fields |= {"engine": served.engine_beside(resident_bytes(choice, update)), "decode": None}
        sync = WeightSync().model_copy(update={"fixed_s": hand_over.weight_sync_s})
        fields |= {"prefill": None, "weight_sync": sync}
    fields["throttle"] = (rollout.throttle or Throttle()) if choice.throttled else None
    fields["kv"] = caches(loop, choice, served)
    return RolloutScenario(**fields)
