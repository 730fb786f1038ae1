"""The rules of plan/schedules/placement.py on many candidates at once."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.plan.schedules.placement import (
    CHUNKS_PER_STAGE,
    IN_ROUNDS,
    PAIRED,
    fewest_microbatches,
)
from flopwright.simulator.training.candidates import (
    DATA_PARALLELS,
    SCHEDULES,
    Candidates,
    Ints,
)

Bools = NDArray[np.bool_]

_LEAST: Final = np.array([CHUNKS_PER_STAGE[s][0] for s in SCHEDULES])
_MOST: Final = np.array([CHUNKS_PER_STAGE[s][1] or np.iinfo(np.int64).max for s in SCHEDULES])
_FSDP2: Final = DATA_PARALLELS.index("fsdp2")
_PAIRED: Final = np.array([s in PAIRED for s in SCHEDULES])
_ROUNDS: Final = np.array([s in IN_ROUNDS for s in SCHEDULES])
# Fewest micro-batches a stage; where any number will do, 0.
_FEWEST: Final = np.array(
    [f if (f := fewest_microbatches(s, 1)) > 1 else 0 for s in SCHEDULES], np.int64
)


def paired(c: Candidates) -> Bools:
    """Returns whether the schedule runs forwards and backwards as pairs."""
    return np.asarray(_PAIRED[c.schedule])


def reduces(c: Candidates) -> Bools:
    """Returns plan/lower.py's reduces_gradients of each candidate."""
    dense = c.dp * c.cp * np.where(c.sequence_parallel > 0, c.tp, 1)
    experts = c.dp * c.cp * c.tp // (c.ep * c.etp)
    return np.asarray(np.maximum(dense, experts) > 1)


def reduces_by_chunk(c: Candidates) -> Bools:
    """Returns whether chunks reduce by themselves, not the whole stage at the step's end."""
    return np.asarray((c.zero_stage >= 2) | (c.data_parallel == _FSDP2))


def chunks_fit(c: Candidates) -> Bools:
    """Returns whether vpp and schedule go together."""
    return np.asarray((_LEAST[c.schedule] <= c.vpp) & (c.vpp <= _MOST[c.schedule]))


def rounds_fit(c: Candidates, microbatches: Ints) -> Bools:
    """Returns whether the micro-batches are a multiple of pp where the schedule needs that."""
    return np.asarray(~_ROUNDS[c.schedule] | (c.vpp == 1) | (microbatches % c.pp == 0))


def enough_microbatches(c: Candidates, microbatches: Ints) -> Bools:
    """Returns whether there are as many micro-batches as the schedule needs."""
    return np.asarray(microbatches >= _FEWEST[c.schedule] * c.pp)
