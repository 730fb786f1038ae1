"""The only things a `cost.py` returns: operators, tensor lifetimes and collectives.

Tables are struct-of-arrays. Numeric columns have the shape (rows, candidates), the
candidate axis last, so that one pass prices many plans; an operator that a candidate does
not have gets count 0. Everything is for one micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class OpKind(IntEnum):
    """Kernel class: each has its own efficiency curve."""

    GEMM = 0
    GROUPED_GEMM = 1
    ATTENTION = 2
    MEMORY_BOUND = 3  # norms, activations, rotary, permutes, residual sums, losses
    OPTIMIZER = 4
    QUANTIZE = 5  # casts to and from narrow formats, scales included


class Phase(IntEnum):
    """When an operator runs."""

    FORWARD = 0
    BACKWARD_INPUT = 1
    BACKWARD_WEIGHT = 2
    STEP = 3  # once an optimizer step


class Collective(IntEnum):
    """Communication pattern."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_TO_ALL = 3
    SEND_RECV = 4
    BROADCAST = 5


_NUMERIC: Final = ("m", "k", "n", "batch", "count", "flops", "read_bytes", "written_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """Operators of one micro-batch.

    Attributes:
        name: what it is ("attention.q_b_proj").
        tag: recompute group; a policy that drops the tag runs the forward rows again.
        kernel: kernel choice the row was priced for.
        m, k, n, batch: problem shape; for attention m = query length, n = key length,
            k = query/key head width, batch = sequences * heads.
        count: how often it runs; flops, read_bytes, written_bytes: of one run, executed.
    """

    name: tuple[str, ...]
    tag: tuple[str, ...]
    kernel: tuple[str, ...]
    dtype: tuple[str, ...]
    kind: NDArray[np.int8]
    phase: NDArray[np.int8]
    m: Array
    k: Array
    n: Array
    batch: Array
    count: Array
    flops: Array
    read_bytes: Array
    written_bytes: Array

    def __len__(self) -> int:
        return len(self.name)

    @property
    def num_candidates(self) -> int:
        """Length of the candidate axis."""
        return int(self.m.shape[1])

    def total_flops(self, phase: Phase | None = None) -> Array:
        """Returns executed FLOPs by candidate, of one phase or of all."""
        rows = np.ones(len(self), bool) if phase is None else self.phase == phase
        return np.asarray((self.flops * self.count)[rows].sum(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLife:
    """Tensors saved for the backward pass of one micro-batch.

    Attributes:
        cls: memory class ("activation", "temporary").
        tag: recompute group that drops it ("" for what is always kept).
        fp8: whether FP8 activation storage applies to it.
        bytes: bytes by candidate, in the precision it is normally kept in.
    """

    name: tuple[str, ...]
    cls: tuple[str, ...]
    tag: tuple[str, ...]
    fp8: NDArray[np.bool_]
    bytes: Array

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommTable:
    """Communication of one micro-batch.

    Attributes:
        group: "tp", "ep", "cp", "pp", "dp" or "edp" (plan/mesh.py).
        bytes: payload by rank and call: the full tensor for all-reduce and all-gather
            output, what one rank sends in total for all-to-all and send.
        overlaps_with: phase of compute that may hide it, "" if nothing may.
    """

    name: tuple[str, ...]
    collective: NDArray[np.int8]
    group: tuple[str, ...]
    phase: NDArray[np.int8]
    bytes: Array
    count: Array
    overlaps_with: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """What a block costs: its three tables."""

    ops: OpTable
    lives: TensorLife
    comms: CommTable


@dataclass(slots=True)
class CostBuilder:
    """Collects rows and broadcasts them to one candidate axis."""

    _ops: list[dict[str, Any]] = field(default_factory=list)
    _lives: list[dict[str, Any]] = field(default_factory=list)
    _comms: list[dict[str, Any]] = field(default_factory=list)

    def op(
        self,
        name: str,
        kind: OpKind,
        phase: Phase,
        *,
        dtype: str,
        flops: ArrayLike = 0.0,
        read_bytes: ArrayLike = 0.0,
        written_bytes: ArrayLike = 0.0,
        m: ArrayLike = 1.0,
        k: ArrayLike = 1.0,
        n: ArrayLike = 1.0,
        batch: ArrayLike = 1.0,
        count: ArrayLike = 1.0,
        tag: str = "",
        kernel: str = "reference",
    ) -> None:
        """Adds an operator row."""
        self._ops.append(
            {
                "name": name,
                "kind": kind,
                "phase": phase,
                "dtype": dtype,
                "flops": flops,
                "read_bytes": read_bytes,
                "written_bytes": written_bytes,
                "m": m,
                "k": k,
                "n": n,
                "batch": batch,
                "count": count,
                "tag": tag,
                "kernel": kernel,
            }
        )

    def saved(
        self,
        name: str,
        nbytes: ArrayLike,
        *,
        tag: str = "",
        cls: str = "activation",
        fp8: bool = False,
    ) -> None:
        """Adds a tensor that lives from forward to backward."""
        self._lives.append({"name": name, "bytes": nbytes, "tag": tag, "cls": cls, "fp8": fp8})

    def comm(
        self,
        name: str,
        collective: Collective,
        group: str,
        phase: Phase,
        *,
        nbytes: ArrayLike,
        count: ArrayLike = 1.0,
        overlaps_with: str = "",
    ) -> None:
        """Adds a collective."""
        self._comms.append(
            {
                "name": name,
                "collective": collective,
                "group": group,
                "phase": phase,
                "bytes": nbytes,
                "count": count,
                "overlaps_with": overlaps_with,
            }
        )

    def extend(self, cost: BlockCost, prefix: str = "", repeat: ArrayLike = 1.0) -> None:
        """Adds the rows of a built cost under `prefix`, run `repeat` times."""
        o, t, c = cost.ops, cost.lives, cost.comms
        times = np.asarray(repeat, float)
        for i in range(len(o)):
            self.op(
                prefix + o.name[i],
                OpKind(o.kind[i]),
                Phase(o.phase[i]),
                dtype=o.dtype[i],
                flops=o.flops[i],
                read_bytes=o.read_bytes[i],
                written_bytes=o.written_bytes[i],
                m=o.m[i],
                k=o.k[i],
                n=o.n[i],
                batch=o.batch[i],
                count=o.count[i] * times,
                tag=o.tag[i],
                kernel=o.kernel[i],
            )
        for i in range(len(t)):
            self.saved(
                prefix + t.name[i],
                t.bytes[i] * times,
                tag=t.tag[i],
                cls=t.cls[i],
                fp8=bool(t.fp8[i]),
            )
        for i in range(len(c)):
            self.comm(
                prefix + c.name[i],
                Collective(c.collective[i]),
                c.group[i],
                Phase(c.phase[i]),
                nbytes=c.bytes[i],
                count=c.count[i] * times,
                overlaps_with=c.overlaps_with[i],
            )

    def build(self, num_candidates: int = 1) -> BlockCost:
        """Returns the tables, every numeric column of shape (rows, num_candidates)."""

        def columns(rows: list[dict[str, Any]], key: str) -> Array:
            out = np.empty((len(rows), num_candidates))
            for place, row in zip(out, rows, strict=True):
                place[:] = row[key]
            return out

        def names(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[str, ...]:
            return tuple(str(r[key]) for r in rows)

        def codes(rows: list[dict[str, Any]], key: str) -> NDArray[np.int8]:
            return np.array([int(r[key]) for r in rows], np.int8)

        ops = OpTable(
            name=names(self._ops, "name"),
            tag=names(self._ops, "tag"),
            kernel=names(self._ops, "kernel"),
            dtype=names(self._ops, "dtype"),
            kind=codes(self._ops, "kind"),
            phase=codes(self._ops, "phase"),
            **{key: columns(self._ops, key) for key in _NUMERIC},
        )
        lives = TensorLife(
            name=names(self._lives, "name"),
            cls=names(self._lives, "cls"),
            tag=names(self._lives, "tag"),
            fp8=np.array([r["fp8"] for r in self._lives], bool),
            bytes=columns(self._lives, "bytes"),
        )
        comms = CommTable(
            name=names(self._comms, "name"),
            collective=codes(self._comms, "collective"),
            group=names(self._comms, "group"),
            phase=codes(self._comms, "phase"),
            bytes=columns(self._comms, "bytes"),
            count=columns(self._comms, "count"),
            overlaps_with=names(self._comms, "overlaps_with"),
        )
        return BlockCost(ops=ops, lives=lives, comms=comms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardShape:
    """What a block needs to know of a plan: local shapes, broadcasting over candidates.

    Attributes:
        micro_batch_size: sequences of one micro-batch on a rank.
        seq_len: tokens of a sequence (before context parallelism).
        tp, ep, cp, etp: group sizes.
        sequence_parallel: norms and residuals see tokens / tp instead of all.
        ulysses: a context group exchanges heads for tokens instead of keys and values.
        dtype: compute dtype name; weights and activations have its width.
        attention_kernel: "flash", or "unfused": scores are written, read and kept.
        pad_vocab_to: a tp rank's part of the vocabulary is padded to a multiple of it.
        expert_load: rows that the busiest rank's experts take over the mean.
        fused_loss: head and loss in one, without logits in memory.
        documents: (tokens, share by number) of those packed in rows, which see only themselves;
            (): a row is one.
    """

    micro_batch_size: ArrayLike = 1
    seq_len: ArrayLike = 1
    tp: ArrayLike = 1
    ep: ArrayLike = 1
    cp: ArrayLike = 1
    dtype: str = "bf16"
    etp: ArrayLike = 1
    sequence_parallel: ArrayLike = True
    ulysses: ArrayLike = False
    attention_kernel: str = "flash"
    pad_vocab_to: int = 1
    expert_load: ArrayLike = 1
    fused_loss: ArrayLike = False
    documents: tuple[tuple[int, float], ...] = ()

    @property
    def tokens(self) -> Array:
        """Tokens of one micro-batch on one rank: micro_batch_size * seq_len / cp."""
        return np.asarray(
            np.asarray(self.micro_batch_size, float)
            * np.asarray(self.seq_len, float)
            / np.asarray(self.cp, float)
        )
