"""The flat state of one generation phase: what both event loops start from and leave behind.

Rows are attempts by age. A column is an index into the second axis, so that the compiled loop
sees plain arrays. Times are seconds since the phase began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# ---- integer columns of an attempt ------------------------------------------------------
ID: Final = 0
PROMPT: Final = 1  # index of its prompt among those in flight
STATUS: Final = 2
TOKENS: Final = 3  # generated so far
TOTAL: Final = 4  # generated when it is complete; no policy sees it
CONTEXT: Final = 5  # tokens a decode step would read: prompt, generated, read from tools
SEEN: Final = 6  # of these, tokens that have been in a cache at some time
TURN: Final = 7  # index of its present turn in `turn_tokens`
TURN_END: Final = 8
TURN_DONE: Final = 9  # tokens generated in the present turn
SPENT: Final = 10  # tokens generated in this round
HOME: Final = 11  # instance that has, or last had, its cache; -1: none
PLACE: Final = 12  # where its cache is
CACHED: Final = 13  # tokens in it
FIRST: Final = 14  # policy version of its first token; -1: none yet
SUBMITTED: Final = 15  # policy version at which it came into flight
MUST: Final = 16  # 1: the round waits for it
# Used inside a phase only.
RUN: Final = 17  # tokens it may generate before it leaves its slot
BEFORE: Final = 18  # neighbours in its instance's list of running or of waiting caches
AFTER: Final = 19
LANE_BEFORE: Final = 20  # neighbours in the line of prefills
LANE_AFTER: Final = 21
PRE_LEFT: Final = 22  # tokens still to prefill
PRE_AT: Final = 23  # tokens in front of them
CHILD: Final = 24  # links of the heap it is in
SIBLING: Final = 25
PARENT: Final = 26
IN: Final = 27  # the heap it is in, by number; -1: none
COLUMNS: Final = 28

# ---- float columns ----------------------------------------------------------------------
READY_S: Final = 0  # when its tool call ends
ESTIMATE: Final = 1  # tokens it is thought to have in the end
KEY: Final = 2  # of the heap it is in
SCORE: Final = 3  # the normal score of its prompt
VERDICT_S: Final = 4  # seconds of work to judge it; of one comparison, on average, in pairs
FLOAT_COLUMNS: Final = 5

# ---- status ------------------------------------------------------------------------------
QUEUED: Final = 0
RUNNING: Final = 1
PARKED: Final = 2
FINISHED: Final = 3
DONE: Final = 4
TOOL: Final = 5  # in a tool call
SPENT_UP: Final = 6  # has generated what a round allows
PREFILL: Final = 7  # holds a slot, its context is being read
LOADING: Final = 8  # holds a slot, its cache comes from the host
JUDGED: Final = 9  # complete, waits for the verdict without which it does not count

# ---- events of the log -------------------------------------------------------------------
KINDS: Final = (
    "admit", "finish", "tool", "return", "chunk", "spent", "preempt", "evict", "loaded", "end",
    "verdict",
)  # fmt: skip
ADMIT, FINISH, CALL, RETURN, CHUNK, SPEND, PREEMPT, EVICT, LOADED, END, VERDICT = range(11)

NO_LIMIT: Final = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The numbers of a phase that are the same for every round of a scenario.

    Attributes:
        base_s, per_context_s: seconds of a decode step by active attempts, float[slots + 1].
        capacity, block, state_blocks: cache of an instance in blocks, tokens of a block, blocks
            an attempt takes at any length.
        shared: blocks of a prompt that its samples on one instance hold together.
        chunk_prefill: tokens of prefill that ride along with a step; 0: prefill stands alone.
        load_s: seconds to bring a cached token back, by place (nowhere, GPU, host, NVMe).
        host_tokens, nvme_tokens: room of an instance's pools.
        dealt: attempts are dealt to instances at the start and stay there.
        high, low: blocks of cache of the throttle; `limit` attempts to start from.
        rewarded: 0: an attempt counts when it is complete; 1: when its verdict is there; 2: when
            `pairs` comparisons of the samples of its prompt are there.
    """

    instances: int
    base_s: Floats
    per_context_s: Floats
    slots: int
    concurrency: int
    capacity: int
    block: int
    state_blocks: int
    shared: int
    prompt_tokens: int
    prefill_fixed_s: float
    prefill_token_s: float
    prefill_pair_s: float
    chunk_prefill: int
    swap: bool
    drop_idle: bool
    prefetch: bool
    load_s: Floats
    host_tokens: int
    nvme_tokens: int
    order: int
    dealt: bool
    chunk: int
    budget: int
    strict: bool
    groups: bool
    throttled: bool
    high: int
    low: int
    limit: float
    decrease: float
    increase: float
    rewarded: int
    pairs: int


@dataclass(slots=True, kw_only=True)
class PhaseState:
    """Everything one phase reads and writes.

    Attributes:
        rows: int64[attempts, COLUMNS]; times: float64[attempts, FLOAT_COLUMNS].
        turn_tokens, turn_read: tokens generated in each turn and read after it; turn_s: the
            seconds of its tool call. A turn belongs to the attempt whose TURN..TURN_END holds it.
        left: samples of each prompt in flight that are not complete; seen: tokens of its
            longest complete sample; dealt: the instance it is dealt to.
        servers: seconds at which each place for a tool call becomes free, a heap; empty: no
            limit.
        judges: seconds at which each worker that gives verdicts becomes free, a heap; empty where
            nothing waits for one.
        limits: attempts that each instance's throttle allows.
        needed: completions that end the phase; overdue: attempts it waits for besides.
        deadline_s: the phase ends there at the latest.
    """

    rules: Rules
    rows: Ints
    times: Floats
    turn_tokens: Ints
    turn_read: Ints
    turn_s: Floats
    left: Ints
    seen: Ints
    dealt: Ints
    servers: Floats
    judges: Floats
    limits: Floats
    needed: int
    version: int
    deadline_s: float = float("inf")


@dataclass(slots=True, kw_only=True)
class EventLog:
    """What happened, in order: one entry an event.

    Attributes:
        time_s: float[n]; kind: index into KINDS; attempt: its id (-1: none); instance: -1 none.
        kv_tokens: tokens of cache taken on that instance after the event.
    """

    time_s: Floats
    kind: Ints
    attempt: Ints
    instance: Ints
    kv_tokens: Ints


@dataclass(slots=True, kw_only=True)
class PhaseResult:
    """What a phase counted, beside the state it changed.

    Attributes:
        end_s: seconds of the phase.
        finish_s, finish_row: each counted completion in order.
        busy_s: attempt-seconds that decoded, of each instance.
        kv_peak: blocks of cache of each instance at its fullest.
        host_peak: tokens in the host pools at their fullest.
        preemptions ... tool_wait_s: counts over all instances.
        log: where one was asked for.
    """

    end_s: float
    finish_s: Floats
    finish_row: Ints
    busy_s: Floats
    kv_peak: Ints
    host_peak: int
    preemptions: int = 0
    evictions: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    loaded_tokens: int = 0
    prefill_s: float = 0.0
    tool_calls: int = 0
    tool_wait_s: float = 0.0
    decoded_tokens: int = 0
    events: int = 0
    log: EventLog | None = None
