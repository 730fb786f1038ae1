"""One generation phase in the compiled loop: arrays in, the same result as the reference out."""

from __future__ import annotations

from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.compiled import columns as c
from flopwright.simulator.rollouts.compiled.columns import Arrays
from flopwright.simulator.rollouts.compiled.handle import places
from flopwright.simulator.rollouts.compiled.heaps import new_tree
from flopwright.simulator.rollouts.compiled.loop import run
from flopwright.simulator.rollouts.state import EventLog, PhaseResult, PhaseState, Rules

_MOST_CELLS: Final = 50_000_000
_FIRST_LOG: Final = 4096


def generate(state: PhaseState, log: bool = False) -> PhaseResult:
    """Runs one generation phase; writes back what became of every attempt."""
    entries = _FIRST_LOG + 16 * len(state.rows) if log else 0
    while True:
        arrays = arrays_of(state, entries)
        at = places(arrays)
        run(at.ctypes.data)
        needed = int(arrays.counts[c.LOGGED])
        if not log or needed <= entries:
            break
        entries = needed
    assert arrays.counts[c.OVER] != 2, "a phase stands still"
    ends = arrays.counts[c.OVER] or state.rules.budget or state.deadline_s < np.inf
    assert ends, "a phase stalled"
    state.rows[:] = arrays.rows
    state.times[:] = arrays.times
    state.left[:], state.seen[:] = arrays.prompts[:, 0], arrays.prompts[:, 1]
    state.servers[:] = np.sort(arrays.servers)
    state.judges[:] = np.sort(arrays.judges)
    state.limits[:] = arrays.floats[:, c.LIMIT]
    return _result(arrays, state.rules, log)


def arrays_of(state: PhaseState, entries: int) -> Arrays:
    """Returns fresh arrays of a phase; its rows are copied, so that it can be run again."""
    rules, rows = state.rules, state.rows.copy()
    instances, prompts = rules.instances, len(state.left)
    if rules.shared and instances * prompts > _MOST_CELLS:
        raise InputError(
            Violation(
                field="engine.prefix_cache",
                rule=f"{instances} instances x {prompts} prompts are too many to keep apart",
                nearest_fix="prefix_cache: false, or fewer instances",
            )
        )
    links = [st.BEFORE, st.AFTER, st.LANE_BEFORE, st.LANE_AFTER]
    rows[:, [*links, st.CHILD, st.SIBLING, st.PARENT, st.IN]] = -1
    ints = np.zeros((instances, c.INSTANCE_INTS), dtype=np.int64)
    ends = [c.HEAD, c.TAIL, c.IDLE_HEAD, c.IDLE_TAIL, c.LANE_HEAD, c.LANE_TAIL, c.LOAD_HEAD]
    ints[:, [*ends, c.LOAD_TAIL]] = -1
    floats = np.zeros((instances, c.INSTANCE_FLOATS))
    floats[:, c.NEXT_S], floats[:, c.LIMIT] = np.inf, state.limits
    counts = np.zeros(c.COUNT_INTS, dtype=np.int64)
    counts[c.OVERDUE] = rows[:, st.MUST].sum()
    sums = np.zeros(c.COUNT_FLOATS)
    sums[c.DEADLINE_S] = state.deadline_s
    return Arrays(
        rows=rows,
        times=state.times.copy(),
        roots=np.full(3 * instances + 2, -1, dtype=np.int64),
        ints=ints,
        floats=floats,
        residues=np.zeros((instances, rules.block if rules.block > 1 else 1), dtype=np.int64),
        samples=np.zeros((instances, prompts) if rules.shared else (1, 1), dtype=np.int64),
        counts=counts,
        sums=sums,
        rules=rule_numbers(rules, state),
        rates=np.array(
            [
                rules.prefill_fixed_s,
                rules.prefill_token_s,
                rules.prefill_pair_s,
                rules.decrease,
                rules.increase,
            ]
        ),
        tables=np.stack([rules.base_s, rules.per_context_s]),
        load_s=rules.load_s,
        turns=np.stack([state.turn_tokens, state.turn_read], axis=1),
        turn_s=state.turn_s,
        prompts=np.stack([state.left, state.seen], axis=1),
        dealt=state.dealt,
        servers=state.servers.copy(),
        judges=state.judges.copy(),
        tree=new_tree(instances),
        finish_s=np.zeros(len(rows)),
        finish_row=np.zeros(len(rows), dtype=np.int64),
        log_s=np.zeros(entries),
        log=np.zeros((entries, 4), dtype=np.int64),
    )


def rule_numbers(rules: Rules, state: PhaseState) -> c.Ints:
    """Returns the whole-number rules at their columns."""
    out = np.zeros(c.RULE_INTS, dtype=np.int64)
    for column, value in (
        (c.INSTANCES, rules.instances),
        (c.SLOTS, rules.slots),
        (c.CONCURRENCY, rules.concurrency),
        (c.CAPACITY, rules.capacity),
        (c.BLOCK, rules.block),
        (c.STATE_BLOCKS, rules.state_blocks),
        (c.SHARED, rules.shared),
        (c.RIDE, rules.chunk_prefill),
        (c.SWAP, rules.swap),
        (c.DROP_IDLE, rules.drop_idle),
        (c.PREFETCH, rules.prefetch),
        (c.HOST_TOKENS, rules.host_tokens),
        (c.NVME_TOKENS, rules.nvme_tokens),
        (c.ORDER, rules.order),
        (c.DEALT, rules.dealt),
        (c.CHUNK_TOKENS, rules.chunk),
        (c.BUDGET, rules.budget),
        (c.STRICT, rules.strict),
        (c.GROUPS, rules.groups),
        (c.THROTTLED, rules.throttled),
        (c.HIGH, rules.high),
        (c.LOW, rules.low),
        (c.NEEDED, state.needed),
        (c.VERSION, state.version),
        (c.REWARDED, rules.rewarded),
        (c.PAIRS, rules.pairs),
    ):
        out[column] = value
    return out


def _result(arrays: Arrays, rules: Rules, log: bool) -> PhaseResult:
    counts, sums = arrays.counts, arrays.sums
    done, logged = int(counts[c.FINISHES]), int(counts[c.LOGGED])
    entries = None
    if log:
        entries = EventLog(
            time_s=arrays.log_s[:logged],
            kind=arrays.log[:logged, 0],
            attempt=arrays.log[:logged, 1],
            instance=arrays.log[:logged, 2],
            kv_tokens=arrays.log[:logged, 3],
        )
    return PhaseResult(
        end_s=float(sums[c.LAST_S]),
        finish_s=arrays.finish_s[:done],
        finish_row=arrays.finish_row[:done],
        busy_s=arrays.floats[:, c.BUSY_S],
        kv_peak=arrays.ints[:, c.PEAK],
        host_peak=int(counts[c.HOST_PEAK]),
        preemptions=int(counts[c.PREEMPTIONS]),
        evictions=int(counts[c.EVICTIONS]),
        prefill_tokens=int(counts[c.PREFILL_TOKENS]),
        recomputed_tokens=int(counts[c.RECOMPUTED]),
        loaded_tokens=int(counts[c.LOADED_TOKENS]),
        prefill_s=float(sums[c.PREFILL_SECONDS]),
        tool_calls=int(counts[c.TOOL_CALLS]),
        tool_wait_s=float(sums[c.TOOL_WAIT_S]),
        decoded_tokens=int(counts[c.DECODED]),
        events=int(counts[c.EVENTS]),
        log=entries,
    )
