"""What attention over chosen positions costs: the choice, the attention, what the indexer learns.

Only pairs that are scored or chosen are executed. With s tokens and w = min(top_k, s) a sequence
has s (s + 1) / 2 pairs to score and w (w + 1) / 2 + (s - w) w chosen ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.ops import Array, CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES

INDEX_BYTES = DTYPE_BYTES["fp32"]  # of a chosen position: int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Pairs of `sequences` of seq_len tokens each, of which one rank has 1 / cp of the queries.

    Attributes:
        top_k: positions that a query attends to at most; heads, width: of the indexer.
    """

    sequences: ArrayLike
    seq_len: ArrayLike
    top_k: int
    heads: float
    width: int
    dtype: str
    cp: ArrayLike = 1.0

    @property
    def queries(self) -> Array:
        """Queries of this rank."""
        b, s, c = (np.asarray(x, float) for x in (self.sequences, self.seq_len, self.cp))
        return np.asarray(b * s / c)

    @property
    def scored(self) -> Array:
        """Pairs that the indexer scores."""
        return np.asarray(self.queries * (np.asarray(self.seq_len, float) + 1) / 2)

    @property
    def chosen(self) -> Array:
        """Pairs that attention is over."""
        s = np.asarray(self.seq_len, float)
        w = np.minimum(s, self.top_k)
        return np.asarray(self.queries * (w * (w + 1) / 2 + (s - w) * w) / s)

    @property
    def kept(self) -> Array:
        """Positions that are noted down: min(top_k, seq_len) a query."""
        return np.asarray(self.queries * np.minimum(np.asarray(self.seq_len, float), self.top_k))


def select_keys(cost: CostBuilder, name: str, of: Choice, share: ArrayLike = 1.0) -> None:
    """Adds the scores, written in fp32, and the search for the largest of each query.

    Args:
        share: of the queries, where ranks choose for other ones each.
    """
    part, width = np.asarray(share, float), DTYPE_BYTES[of.dtype]
    scores = of.scored * part * wide_bytes(of.dtype)
    read = (of.queries * part * of.heads + of.queries * np.asarray(of.cp, float)) * of.width
    cost.op(
        f"{name}.scores", OpKind.ATTENTION, Phase.FORWARD, dtype=of.dtype,
        flops=2 * of.scored * part * of.heads * of.width, m=of.queries * part, n=of.seq_len,
        k=of.width, batch=of.heads, read_bytes=read * width, written_bytes=scores,
    )  # fmt: skip
    memory_bound(
        cost, f"{name}.top_k", Phase.FORWARD, dtype=of.dtype, elements=of.scored * part,
        read_bytes=scores, written_bytes=of.kept * part * INDEX_BYTES,
    )  # fmt: skip


def selected_attention(
    cost: CostBuilder, name: str, of: Choice, *, heads: ArrayLike, width: int, v_width: int
) -> None:
    """Adds forward and backward over chosen keys that all heads share.

    Forward: 2 chosen heads (width + v_width). Backward computes the scores again:
    2 chosen heads (3 width + 2 v_width). Each query reads its own keys; gradients of keys are
    sums in fp32.
    """
    h, size, wide = np.asarray(heads, float), DTYPE_BYTES[of.dtype], wide_bytes(of.dtype)
    q, out, lse = (
        of.queries * h * width * size, of.queries * h * v_width * size, of.queries * h * wide,
    )  # fmt: skip
    found = of.chosen * width * size + of.kept * INDEX_BYTES
    rows = (
        (Phase.FORWARD, width + v_width, q + found, out + lse),
        (
            Phase.BACKWARD_INPUT, 3 * width + 2 * v_width, q + found + 2 * out + lse,
            q + of.chosen * width * wide,
        ),
    )  # fmt: skip
    for phase, widths, read, written in rows:
        cost.op(
            name, OpKind.ATTENTION, phase, dtype=of.dtype, flops=2 * of.chosen * h * widths,
            m=of.queries, n=np.minimum(np.asarray(of.seq_len, float), of.top_k), k=width, batch=h,
            read_bytes=read, written_bytes=written,
        )  # fmt: skip


def index_loss(
    cost: CostBuilder, name: str, of: Choice, *, heads: ArrayLike, width: int,
    share: ArrayLike = 1.0,
) -> None:  # fmt: skip
    """Adds the divergence and its gradients, all made forward; backward scales them.

    The heads' mean attention takes their scores once more (2 chosen heads width); the
    indexer's own scores and their gradients 2 chosen index_heads index_width each of 3.

    Args:
        heads, width: of the attention; share: of the queries, as in `select_keys`.
    """
    h, size, part = np.asarray(heads, float), DTYPE_BYTES[of.dtype], np.asarray(share, float)
    wide = wide_bytes(of.dtype)
    own = of.queries * part * of.heads * of.width * size
    cost.op(
        name, OpKind.ATTENTION, Phase.FORWARD, dtype=of.dtype, m=of.queries, k=width, batch=h,
        n=np.minimum(np.asarray(of.seq_len, float), of.top_k),
        flops=2 * of.chosen * h * width + 6 * of.chosen * part * of.heads * of.width,
        read_bytes=of.queries * h * width * size + of.chosen * width * size + own,
        written_bytes=own + of.chosen * part * of.width * wide,
    )  # fmt: skip
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=of.dtype, elements=own / size, read_bytes=own,
        written_bytes=own,
    )  # fmt: skip


def head_linear(
    cost: CostBuilder, name: str, *, rows: ArrayLike, heads: ArrayLike, k: int, n: int, dtype: str,
    tag: str = "",
) -> None:  # fmt: skip
    """Adds the rows of a product with a matrix [n, k] a head; 2 rows heads k n FLOPs each."""
    t, h, size = np.asarray(rows, float), np.asarray(heads, float), DTYPE_BYTES[dtype]
    x, w, y = t * h * k * size, h * k * n * size, t * h * n * size
    table = (
        (Phase.FORWARD, (t, k, n), x + w, y),
        (Phase.BACKWARD_INPUT, (t, n, k), y + w, x),
        (Phase.BACKWARD_WEIGHT, (np.full_like(t, n), t, k), y + x, w),
    )
    for phase, (m, inner, out), read, written in table:
        cost.op(
            name, OpKind.GEMM, phase, dtype=dtype, flops=2 * t * h * k * n, m=m, k=inner, n=out,
            batch=h, read_bytes=read, written_bytes=written,
            tag=tag if phase is Phase.FORWARD else "",
        )  # fmt: skip
