"""What one rank sees of a block under a plan: token counts and the collectives around it.

With sequence parallelism (arXiv 2205.05198) a rank holds tokens / tp of each micro-batch
between the cut matrices: what a cut matrix needs whole is gathered before it, and its
partial sums are reduce-scattered after it. Without it every rank holds all tokens there, and
sums are all-reduced: after a cut matrix forward, before it backward (arXiv 1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flopwright.kernels.memory_bound import memory_bound
from flopwright.ops import Array, Collective, CostBuilder, Phase, ShardShape
from flopwright.spec.cluster import DTYPE_BYTES

Bools = NDArray[np.bool_]


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
    def etp(self) -> Array:
        """Ranks that cut each expert."""
        return np.asarray(self.shape.etp, float)

    @cached_property
    def sequence_parallel(self) -> Bools:
        """Where tokens are cut over tp between the cut matrices, as booleans."""
        return np.asarray(np.asarray(self.shape.sequence_parallel, bool) | (self.tp == 1))

    @cached_property
    def ulysses(self) -> Bools:
        """Where a context group exchanges heads for tokens, as booleans."""
        return np.asarray(np.asarray(self.shape.ulysses, bool) & (self.cp > 1))

    @cached_property
    def shard_tokens(self) -> Array:
        """Tokens that norms, residuals, routers and experts' senders see."""
        return np.asarray(self.tokens / np.where(self.sequence_parallel, self.tp, 1.0))

    def vocab(self, size: int) -> Array:
        """Returns a rank's part of a vocabulary of `size`, padding included."""
        pad = self.shape.pad_vocab_to
        part = size / self.tp
        return np.asarray(np.ceil(part / pad) * pad if pad > 1 else part)


def gather(
    cost: CostBuilder,
    name: str,
    local: Local,
    width: ArrayLike,
    *,
    again: bool = True,
    together: bool = False,
) -> None:
    """Adds what brings [tokens, width] to a cut matrix, and its backward.

    Backward reduce-scatters the gradient; where the whole input is not kept (`again`), the
    weight's gradient gathers it once more. Without sequence parallelism the input is there,
    and its gradient is all-reduced. Where both gradients are made `together`, it is gathered
    again before either.
    """
    nbytes = local.tokens * np.asarray(width, float) * local.width
    cut, whole = _counts(local)

    def comm(collective: Collective, phase: Phase, count: Array) -> None:
        if count.any() or count is cut:
            cost.comm(name, collective, "tp", phase, nbytes=nbytes, count=count)

    comm(Collective.ALL_GATHER, Phase.FORWARD, cut)
    if together:
        comm(Collective.ALL_GATHER, Phase.BACKWARD_INPUT, cut)
    comm(Collective.REDUCE_SCATTER, Phase.BACKWARD_INPUT, cut)
    if again and not together:
        comm(Collective.ALL_GATHER, Phase.BACKWARD_WEIGHT, cut)
    comm(Collective.ALL_REDUCE, Phase.BACKWARD_INPUT, whole)


def _counts(local: Local) -> tuple[Array, Array]:
    """Returns how often a cut matrix talks over tp (with sequence parallelism, without)."""
    talks = local.tp > 1
    sequence = local.sequence_parallel
    return np.where(talks & sequence, 1.0, 0.0), np.where(talks & ~sequence, 1.0, 0.0)


def scatter(cost: CostBuilder, name: str, local: Local, width: ArrayLike) -> None:
    """Adds the sum of [tokens, width] over tp after a cut matrix, and its backward.

    With sequence parallelism a reduce-scatter and a gather; without, an all-reduce and nothing.
    """
    nbytes = local.tokens * np.asarray(width, float) * local.width
    cut, whole = _counts(local)
    cost.comm(name, Collective.REDUCE_SCATTER, "tp", Phase.FORWARD, nbytes=nbytes, count=cut)
    cost.comm(name, Collective.ALL_GATHER, "tp", Phase.BACKWARD_INPUT, nbytes=nbytes, count=cut)
    if whole.any():
        cost.comm(name, Collective.ALL_REDUCE, "tp", Phase.FORWARD, nbytes=nbytes, count=whole)


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
