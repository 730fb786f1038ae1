"""What one rank sees of a block under a plan: token counts and the collectives around it.

Tensor parallelism comes with sequence parallelism (arXiv 2205.05198): between the cut
matrices a rank holds tokens / tp of each micro-batch. What a cut matrix needs whole is
gathered before it, and its partial sums are reduce-scattered after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.ops import Array, Collective, CostBuilder, Phase, ShardShape
from flopwright.spec.cluster import DTYPE_BYTES


@dataclass(frozen=True)
class Local:
    """A ShardShape with its derived counts, each an array over candidates.

    Attributes:
        shape: the shape it was made from.
    """

    shape: ShardShape

    @property
    def dtype(self) -> str:
        """Name of the compute dtype."""
        return self.shape.dtype

    @property
    def width(self) -> int:
        """Bytes of one value of the compute dtype."""
        return DTYPE_BYTES[self.shape.dtype]

    @cached_property
    def tp(self) -> Array:
        """Tensor-parallel size."""
        return np.asarray(self.shape.tp, float)

    @cached_property
    def ep(self) -> Array:
        """Expert-parallel size."""
        return np.asarray(self.shape.ep, float)

    @cached_property
    def cp(self) -> Array:
        """Context-parallel size."""
        return np.asarray(self.shape.cp, float)

    @cached_property
    def tokens(self) -> Array:
        """Tokens that cut matrices see."""
        return self.shape.tokens

    @cached_property
    def shard_tokens(self) -> Array:
        """Tokens that norms, residuals, routers and experts' senders see: tokens / tp."""
        return self.tokens / self.tp


def gather(
    cost: CostBuilder, name: str, local: Local, width: ArrayLike, *, again: bool = True
) -> None:
    """Adds the gather of [tokens, width] before a cut matrix, and its backward.

    Backward reduce-scatters the gradient; where the whole input is not kept (`again`), the
    weight's gradient gathers it once more.
    """
    nbytes = local.tokens * np.asarray(width, float) * local.width
    count = np.where(local.tp > 1, 1.0, 0.0)

    def comm(collective: Collective, phase: Phase) -> None:
        cost.comm(name, collective, "tp", phase, nbytes=nbytes, count=count)

    comm(Collective.ALL_GATHER, Phase.FORWARD)
    comm(Collective.REDUCE_SCATTER, Phase.BACKWARD_INPUT)
    if again:
        comm(Collective.ALL_GATHER, Phase.BACKWARD_WEIGHT)


def scatter(cost: CostBuilder, name: str, local: Local, width: ArrayLike) -> None:
    """Adds the reduce-scatter of [tokens, width] after a cut matrix, and its backward gather."""
    nbytes = local.tokens * np.asarray(width, float) * local.width
    count = np.where(local.tp > 1, 1.0, 0.0)
    cost.comm(name, Collective.REDUCE_SCATTER, "tp", Phase.FORWARD, nbytes=nbytes, count=count)
    cost.comm(name, Collective.ALL_GATHER, "tp", Phase.BACKWARD_INPUT, nbytes=nbytes, count=count)


def add(
    cost: CostBuilder, name: str, phase: Phase, elements: ArrayLike, local: Local, times: float = 1
) -> None:
    """Adds sums of two tensors (residuals; gradients of a tensor with several readers)."""
    n = np.asarray(elements, float) * times
    nbytes = n * local.width
    memory_bound(
        cost,
        name,
        phase,
        dtype=local.dtype,
        elements=n,
        read_bytes=2 * nbytes,
        written_bytes=nbytes,
    )
