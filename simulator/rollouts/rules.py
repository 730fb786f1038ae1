"""The rules of a scenario's phases as numbers."""

from __future__ import annotations

import numpy as np

from flopwright.plan import rollout_choices as policy
from flopwright.simulator.rollouts.lengths import Floats
from flopwright.simulator.rollouts.state import NO_LIMIT, Rules
from flopwright.spec.rollout import HostPool, PrefillTable, RolloutScenario

_ORDERS = {
    "fifo": policy.FIFO,
    "longest_first": policy.LONGEST_FIRST,
    "oracle": policy.LONGEST_FIRST,
    "probe": policy.PROBE,
}


_REWARDED = {"none": 0, "program": 1, "judge": 1, "tournament": 2}


def pairs_of(scenario: RolloutScenario) -> int:
    """Returns the comparisons that a prompt's samples need: all of them, or as many as given."""
    samples = scenario.samples_per_prompt
    return scenario.reward.pairs_per_prompt or max(1, samples * (samples - 1) // 2)


def slots_of(scenario: RolloutScenario) -> int:
    """Returns the most attempts an instance can decode at once."""
    limits = [scenario.num_attempts]
    if scenario.slots_per_instance is not None:
        limits.append(scenario.slots_per_instance)
    if scenario.engine is not None and scenario.engine.running_limit is not None:
        limits.append(scenario.engine.running_limit)
    return min(limits)


def step_tables(scenario: RolloutScenario, slots: int) -> tuple[Floats, Floats]:
    """Returns seconds of a step and of a context token in it, by active attempts 0..slots.

    Where several tokens come out of a step (speculative decoding) it is the time a token.
    """
    if scenario.decode is not None:
        decode = scenario.decode
        base_s = decode.a_s + decode.c_s * np.arange(slots + 1, dtype=np.float64)
        per_context_s = np.full(slots + 1, decode.kappa_s)
    else:
        assert scenario.engine is not None
        engine = scenario.engine
        pairs = np.array([engine.decode.coefficients(b) for b in range(slots + 1)])
        draft_s = engine.speculation.draft_s if engine.speculation is not None else 0.0
        base_s = (pairs[:, 0] + draft_s) / engine.tokens_per_step
        per_context_s = pairs[:, 1] / engine.tokens_per_step
    base_s[0] = per_context_s[0] = 0.0
    return base_s, per_context_s


def host_tier(scenario: RolloutScenario) -> HostPool | None:
    """Returns the host pool of an instance."""
    if scenario.kv.host is not None:
        return scenario.kv.host
    return scenario.engine.host_pool if scenario.engine is not None else None


def rules_of(scenario: RolloutScenario) -> Rules:
    """Returns the rules of a scenario's generation phases."""
    engine, kv, schedule = scenario.engine, scenario.kv, scenario.schedule
    slots = slots_of(scenario)
    base_s, per_context_s = step_tables(scenario, slots)
    block = engine.block_tokens if engine is not None else 1
    state = engine.kv_tokens_per_attempt if engine is not None else 0
    tokens = scenario.kv_capacity_tokens
    capacity = NO_LIMIT if tokens is None else tokens // block
    shares = engine is not None and engine.prefix_cache and scenario.samples_per_prompt > 1
    prefill = engine.prefill if engine is not None else scenario.prefill or PrefillTable()
    per_token = scenario.kv_bytes_per_token
    host, nvme = host_tier(scenario), kv.nvme
    load_s = np.zeros(4)
    room = [0, 0]
    for index, tier in enumerate((host, nvme)):
        if tier is not None:
            load_s[policy.ON_HOST + index] = per_token / tier.bytes_per_s
            room[index] = int(tier.size_bytes / per_token) if per_token > 0 else 2**50
    throttle = scenario.throttle
    swap = kv.preemption or (engine.preemption if engine is not None else "recompute")
    return Rules(
        instances=scenario.instances,
        base_s=base_s,
        per_context_s=per_context_s,
        slots=slots,
        concurrency=concurrency_of(scenario),
        capacity=capacity,
        block=block,
        state_blocks=-(-state // block),
        shared=scenario.prompt_tokens // block if shares else 0,
        prompt_tokens=scenario.prompt_tokens,
        prefill_fixed_s=prefill.fixed_s,
        prefill_token_s=prefill.per_token_s,
        prefill_pair_s=prefill.per_pair_s,
        chunk_prefill=(engine.chunk_tokens or 0) if engine is not None else 0,
        swap=swap == "swap",
        drop_idle=kv.idle == "drop",
        prefetch=kv.prefetch,
        load_s=load_s,
        host_tokens=min(room[0], 2**50),
        nvme_tokens=min(room[1], 2**50),
        order=_ORDERS[schedule.order],
        dealt=schedule.routing != "pooled",
        chunk=schedule.chunk_tokens or 0,
        budget=scenario.stop.tokens or 0,
        strict=scenario.ties == "strict",
        groups=scenario.stop.count == "groups",
        throttled=throttle is not None,
        high=NO_LIMIT if throttle is None or tokens is None else int(throttle.high * capacity),
        low=NO_LIMIT if throttle is None or tokens is None else int(throttle.low * capacity),
        limit=float(throttle.start or slots) if throttle is not None else float(slots),
        decrease=throttle.decrease if throttle is not None else 1.0,
        increase=throttle.increase if throttle is not None else 0.0,
        rewarded=_REWARDED[scenario.reward.kind] if scenario.stop.rewarded else 0,
        pairs=pairs_of(scenario),
    )


def concurrency_of(scenario: RolloutScenario) -> int:
    """Returns the attempts an instance may have begun at once.

    Where sandboxes are not paused each holds its place on a host to the end of its attempt,
    so that no more attempts are begun than there are places.
    """
    limit = scenario.schedule.concurrency or NO_LIMIT
    if scenario.agent is not None and not scenario.agent.sandbox.pause:
        places = scenario.agent.sandbox.places
        if places is not None:
            limit = min(limit, max(1, places // scenario.instances))
    return limit
