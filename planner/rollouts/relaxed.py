"""A round without one of the things that may bind it: what it would be like if that were free."""

from __future__ import annotations

from flopwright.planner.rollouts.bounds import work_of
from flopwright.spec.rollout import DeterministicLengths, RolloutScenario
from flopwright.spec.rollouts.scenario import Switch, Update, WeightSync


def relaxed(scenario: RolloutScenario) -> dict[str, RolloutScenario]:
    """Returns the round with each thing taken away, by its name; what it has not is left out.

    "tail": every attempt has the mean length. "tokens": a step of many attempts costs what
    one of a single attempt does. "context": context is read in no time. "cache": never short.
    "update", "switch", "sync": take no time. "sandboxes": start, wake and find room at once.
    "tools": answer at once.
    """
    out: dict[str, RolloutScenario] = {}
    if scenario.lengths.kind != "deterministic":
        mean = max(1, round(work_of(scenario).tokens))
        even = DeterministicLengths(tokens=mean, cap=scenario.lengths.cap)
        out["tail"] = scenario.model_copy(update={"lengths": even})
    out |= _faster_steps(scenario)
    if scenario.kv_capacity_tokens is not None:
        out["cache"] = _endless(scenario)
    update = scenario.update
    if update.fixed_s or update.per_token_s:
        out["update"] = scenario.model_copy(update={"update": Update()})
    if scenario.switch.to_update_s or scenario.switch.to_generation_s:
        out["switch"] = scenario.model_copy(update={"switch": Switch()})
    if scenario.weight_sync.seconds:
        out["sync"] = scenario.model_copy(update={"weight_sync": WeightSync()})
    return out | _acting(scenario)


def _acting(scenario: RolloutScenario) -> dict[str, RolloutScenario]:
    agent = scenario.agent
    if agent is None:
        return {}
    out = {}
    box = agent.sandbox
    if box.places is not None or box.create_s or box.resume_s or box.image_pull_s:
        quick = box.model_copy(
            update={"hosts": None, "create_s": 0.0, "resume_s": 0.0, "image_pull_s": 0.0}
        )
        free = agent.model_copy(update={"sandbox": quick})
        out["sandboxes"] = scenario.model_copy(update={"agent": free})
    if agent.tool_time.mean_s:
        silent = agent.tool_time.model_copy(update={"mean_s": 0.0})
        free = agent.model_copy(update={"tool_time": silent})
        out["tools"] = scenario.model_copy(update={"agent": free})
    return out


def _faster_steps(scenario: RolloutScenario) -> dict[str, RolloutScenario]:
    decode, engine = scenario.decode, scenario.engine
    if decode is not None:
        steps = {"tokens": {"c_s": 0.0}, "context": {"kappa_s": 0.0}}
        changed = {name: decode.model_copy(update=terms) for name, terms in steps.items()}
        return {
            name: scenario.model_copy(update={"decode": law})
            for name, law in changed.items()
            if law != decode and law.a_s + law.c_s + law.kappa_s > 0
        }
    assert engine is not None
    table = engine.decode
    alone = tuple(table.coefficients(1)[0] for _ in table.batch)
    read = tuple(0.0 for _ in table.batch)
    tables = {
        "tokens": table.model_copy(update={"base_s": alone}),
        "context": table.model_copy(update={"per_context_token_s": read}),
    }
    return {
        name: scenario.model_copy(update={"engine": engine.model_copy(update={"decode": faster})})
        for name, faster in tables.items()
        if faster != table and max(*faster.base_s, *faster.per_context_token_s) > 0
    }


def _endless(scenario: RolloutScenario) -> RolloutScenario:
    """Returns the round with room for every attempt in flight at its longest."""
    longest = scenario.longest_context or 1
    engine = scenario.engine
    each = longest if engine is None else engine.attempt_tokens(longest)
    tokens = max(scenario.kv_capacity_tokens or 1, each * scenario.num_attempts)
    if scenario.kv.capacity_bytes is not None:
        size = tokens * scenario.kv.per_token_bytes
        kv = scenario.kv.model_copy(update={"capacity_bytes": size})
        return scenario.model_copy(update={"kv": kv})
    assert engine is not None
    wide = engine.model_copy(update={"kv_capacity_tokens": tokens})
    return scenario.model_copy(update={"engine": wide})
