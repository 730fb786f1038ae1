"""Where things stand in the arrays of the compiled loop, and the arrays themselves."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# ---- integers of an instance -------------------------------------------------------------
STEP: Final = 0
PLANNED: Final = 1
HOLDING: Final = 2  # attempts with a slot
DECODING: Final = 3
READING: Final = 4  # tokens of context that a step reads
USED: Final = 5
PEAK: Final = 6
BEGUN: Final = 7
BLOCKED: Final = 8
FIXED_PAID: Final = 9
HEAD: Final = 10  # attempts with a slot, in order of admission
TAIL: Final = 11
IDLE_HEAD: Final = 12  # caches that wait, oldest first
IDLE_TAIL: Final = 13
IDLE_BLOCKS: Final = 14
LANE_HEAD: Final = 15  # prefills that ride along
LANE_TAIL: Final = 16
BATCH: Final = 17
LOAD_HEAD: Final = 18  # loads that are over
LOAD_TAIL: Final = 19
OWN_SIZE: Final = 20
DEALT_SIZE: Final = 21
INSTANCE_INTS: Final = 22

# ---- floats of an instance ---------------------------------------------------------------
START_S: Final = 0
NEXT_S: Final = 1
BATCH_S: Final = 2
COPY_FREE_S: Final = 3
LIMIT: Final = 4
BUSY_S: Final = 5
NOTED_S: Final = 6
INSTANCE_FLOATS: Final = 7

# ---- counts of the phase -----------------------------------------------------------------
COMPLETED: Final = 0
OVERDUE: Final = 1
OVER: Final = 2
HOST_USED: Final = 3
HOST_PEAK: Final = 4
NVME_USED: Final = 5
PREEMPTIONS: Final = 6
EVICTIONS: Final = 7
PREFILL_TOKENS: Final = 8
RECOMPUTED: Final = 9
LOADED_TOKENS: Final = 10
TOOL_CALLS: Final = 11
DECODED: Final = 12
EVENTS: Final = 13
POOL_SIZE: Final = 14
FINISHES: Final = 15
LOGGED: Final = 16
COUNT_INTS: Final = 17

LAST_S: Final = 0
PREFILL_SECONDS: Final = 1
TOOL_WAIT_S: Final = 2
DEADLINE_S: Final = 3
COUNT_FLOATS: Final = 4

# ---- rules -------------------------------------------------------------------------------
INSTANCES: Final = 0
SLOTS: Final = 1
CONCURRENCY: Final = 2
CAPACITY: Final = 3
BLOCK: Final = 4
STATE_BLOCKS: Final = 5
SHARED: Final = 6
RIDE: Final = 7
SWAP: Final = 8
DROP_IDLE: Final = 9
PREFETCH: Final = 10
HOST_TOKENS: Final = 11
NVME_TOKENS: Final = 12
ORDER: Final = 13
DEALT: Final = 14
CHUNK_TOKENS: Final = 15
BUDGET: Final = 16
STRICT: Final = 17
GROUPS: Final = 18
THROTTLED: Final = 19
HIGH: Final = 20
LOW: Final = 21
NEEDED: Final = 22
VERSION: Final = 23
REWARDED: Final = 24
PAIRS: Final = 25
RULE_INTS: Final = 26

FIXED_S: Final = 0
TOKEN_S: Final = 1
PAIR_S: Final = 2
DECREASE: Final = 3
INCREASE: Final = 4
RULE_FLOATS: Final = 5


class Arrays(NamedTuple):
    """Everything the compiled loop reads and writes.

    Attributes:
        rows, times: attempts; `roots` of the heaps they are in: those that decode, the own
            queue and the dealt one of each instance, then the pool and the tool calls.
        ints, floats: instances; `residues` counts decoding attempts by where in a block their
            context ends; `samples` counts caches of a prompt on an instance.
        counts, sums: of the phase; `rules`, `rates`, `tables` (base and per context token by
            active attempts), `load_s`.
        turns: tokens generated and read; turn_s: seconds of the call.
        prompts: samples left and longest seen; `dealt`, `servers`, `judges`.
        tree: which instance has the next boundary.
        finish_s, finish_row: completions; log_s, log: events.
    """

    rows: Ints
    times: Floats
    roots: Ints
    ints: Ints
    floats: Floats
    residues: Ints
    samples: Ints
    counts: Ints
    sums: Floats
    rules: Ints
    rates: Floats
    tables: Floats
    load_s: Floats
    turns: Ints
    turn_s: Floats
    prompts: Ints
    dealt: Ints
    servers: Floats
    judges: Floats
    tree: Ints
    finish_s: Floats
    finish_row: Ints
    log_s: Floats
    log: Ints
