"""What a mixture-of-experts block costs and keeps.

A rank sends tokens / tp * top_k rows; every rank of the expert group does, and num_experts
/ ep experts live here, so as many rows arrive. Where etp ranks cut each expert, they gather
the rows that arrived at each of them, and reduce-scatter the results. Where experts are
not chosen evenly, the rows that arrive are those of the busiest rank (expert_load times the
mean): all others wait for it. Its input is kept by the layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.grouped_gemm.cost import grouped_gemm
from flopwright.kernels.linear.cost import linear
from flopwright.kernels.memory_bound import memory_bound
from flopwright.kernels.moe_permute.cost import permute, unpermute
from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.kernels.router.cost import route
from flopwright.kernels.swiglu.cost import swiglu
from flopwright.models.local import Local, add
from flopwright.models.mlp.cost import TAG, feed_forward
from flopwright.models.norm.cost import norm
from flopwright.ops import Array, Collective, CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.model import ModelSpec, Moe

TAG_DOWN = "moe_down"
_INDEX_BYTES = DTYPE_BYTES["int64"]
# Bins of quantile balancing over a span of about 2: the error of a bias is at most 0.002.
SCORE_BINS = 1000


def _router(cost: CostBuilder, moe: Moe, hidden: int, local: Local) -> None:
    t, dtype = local.shard_tokens, local.dtype
    wide = wide_bytes(dtype)
    linear(
        cost,
        "gate",
        rows=t,
        k=hidden,
        n=moe.num_experts,
        dtype=dtype,
        bias=moe.bias,
        compute_dtype="fp64" if wide == DTYPE_BYTES["fp64"] else "fp32",
    )
    route(cost, "route", tokens=t, num_experts=moe.num_experts, top_k=moe.top_k, dtype=dtype)
    scored = moe.num_experts if moe.router == "softmax" else moe.top_k
    cost.saved("gate.choices", t * moe.top_k * _INDEX_BYTES)
    cost.saved("gate.scores", t * scored * wide)
    cost.saved("gate.weights", t * moe.top_k * wide)
    if moe.sequence_balance_loss:
        _balance_loss(cost, moe, local)


def _balance_loss(cost: CostBuilder, moe: Moe, local: Local) -> None:
    """Adds the sequence-wise balance loss: it keeps the logits and each sequence's shares.

    Ranks that hold parts of the same sequences sum the shares, which are counted in fp64.
    """
    wide, sequences = wide_bytes(local.dtype), np.asarray(local.shape.micro_batch_size, float)
    logits = local.shard_tokens * moe.num_experts
    cost.saved("gate.logits", logits * wide)
    cost.saved("gate.fractions", sequences * moe.num_experts * wide)
    memory_bound(
        cost, "balance_loss", Phase.BACKWARD_INPUT, dtype=local.dtype, elements=logits,
        read_bytes=logits * wide, written_bytes=logits * wide,
    )  # fmt: skip
    shares = sequences * moe.num_experts * DTYPE_BYTES["fp64"]
    for group, parts in (("tp", (local.tp > 1) & local.sequence_parallel), ("cp", local.cp > 1)):
        count = np.where(parts, 1.0, 0.0)
        cost.comm(
            "gate.fractions", Collective.ALL_REDUCE, group, Phase.FORWARD, nbytes=shares,
            count=count,
        )  # fmt: skip


def _exchange(cost: CostBuilder, name: str, phase: Phase, nbytes: Array, local: Local) -> None:
    leaving = nbytes * (local.ep - 1) / local.ep
    count = np.where(local.ep > 1, 1.0, 0.0)
    cost.comm(name, Collective.ALL_TO_ALL, "ep", phase, nbytes=leaving, count=count)


def _share_rows(cost: CostBuilder, row_bytes: Array, local: Local) -> None:
    """Adds the gathers and reduce-scatters of rows among the ranks that cut an expert."""
    if not (local.etp > 1).any():
        return
    count = np.where(local.etp > 1, 1.0, 0.0)
    for name, first, second in (
        ("experts.rows", Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
        ("experts.results", Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
    ):
        for collective, phase in ((first, Phase.FORWARD), (second, Phase.BACKWARD_INPUT)):
            whole = row_bytes * local.etp
            cost.comm(name, collective, "etp", phase, nbytes=whole, count=count)


def _regroup(cost: CostBuilder, name: str, phase: Phase, nbytes: Array, local: Local) -> None:
    """Adds the copy between arrival order and local-expert order, where rows travel."""
    cost.op(
        name,
        OpKind.MEMORY_BOUND,
        phase,
        dtype=local.dtype,
        m=nbytes / local.width,
        read_bytes=nbytes,
        written_bytes=nbytes,
        count=np.where(local.ep > 1, 1.0, 0.0),
    )


def mixture_of_experts(cost: CostBuilder, spec: ModelSpec, local: Local) -> None:
    """Adds the rows of one block.

    FP8 storage applies to the up-projection's input and to SwiGLU's; recompute groups are
    "swiglu" and "moe_down" (the experts' results, which the combine weights need).
    """
    moe, whole = spec.moe, spec.hidden_size
    assert moe is not None
    _router(cost, moe, whole, local)
    hidden = moe.latent_size or whole  # what experts see of a token
    t, k, dtype, m = local.shard_tokens, moe.top_k, local.dtype, moe.expert_intermediate_size
    experts, cut = moe.num_experts / local.ep, local.etp
    load = np.asarray(local.shape.expert_load, float)
    row_bytes = t * k * hidden * local.width
    arrived = row_bytes * load
    rows, inner = t * k * cut * load, m / cut
    if moe.latent_size is not None:
        linear(cost, "routed_expert_down_proj", rows=t, k=whole, n=hidden, dtype=dtype)
    cost.saved("order", t * k * _INDEX_BYTES)
    cost.saved("place", t * k * _INDEX_BYTES)
    permute(cost, "permute", tokens=t, top_k=k, width=hidden, dtype=dtype)
    for name in ("dispatch", "combine"):
        for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
            _exchange(cost, name, phase, row_bytes, local)
            _regroup(cost, f"{name}.regroup", phase, arrived, local)
    _share_rows(cost, arrived, local)
    # Where rows travel, each of the two copies between arrival and local-expert order keeps
    # the places of the rows that arrived.
    places = 2 * t * k * load * _INDEX_BYTES
    cost.saved("regroup.places", np.where(local.ep > 1, places, 0.0))
    cost.saved("experts.counts", experts * _INDEX_BYTES)
    cost.saved("experts.input", arrived * cut, fp8=True)
    grouped_gemm(
        cost, "experts.gate_up_proj", rows=rows, experts=experts, k=hidden, n=2 * inner,
        dtype=dtype,
    )  # fmt: skip
    _biases(cost, moe, "experts.gate_up_proj_bias", rows, 2 * inner, local)
    cost.saved("experts.gate_up", rows * 2 * inner * local.width, fp8=True)
    swiglu(cost, "experts.swiglu", rows=rows, width=inner, dtype=dtype, tag=TAG)
    cost.saved("experts.inner", rows * inner * local.width, tag=TAG)
    grouped_gemm(
        cost, "experts.down_proj", rows=rows, experts=experts, k=inner, n=hidden, dtype=dtype,
        tag=TAG_DOWN,
    )  # fmt: skip
    _biases(cost, moe, "experts.down_proj_bias", rows, hidden, local, TAG_DOWN)
    cost.saved("experts.out", row_bytes, tag=TAG_DOWN)
    unpermute(cost, "unpermute", tokens=t, top_k=k, width=hidden, dtype=dtype)
    if moe.latent_size is not None:
        _out_of_latent(cost, whole, hidden, local)
    add(cost, "input_grad_sum", Phase.BACKWARD_INPUT, t * whole, local)
    if moe.num_shared_experts:
        width = moe.num_shared_experts * m
        feed_forward(cost, spec.mlp, whole, width, local, "shared_experts.")
        add(cost, "shared_sum", Phase.FORWARD, t * whole, local)
        add(cost, "shared_grad_sum", Phase.BACKWARD_INPUT, t * whole, local)


def _biases(
    cost: CostBuilder, moe: Moe, name: str, rows: Array, width: ArrayLike, local: Local,
    tag: str = "",
) -> None:  # fmt: skip
    """Adds what experts' biases take: a sum with each row, and the sums of its gradient."""
    if not moe.bias:
        return
    n = rows * np.asarray(width, float)
    nbytes = n * local.width
    memory_bound(
        cost, name, Phase.FORWARD, dtype=local.dtype, elements=n, read_bytes=2 * nbytes,
        written_bytes=nbytes, tag=tag,
    )  # fmt: skip
    memory_bound(
        cost, name, Phase.BACKWARD_WEIGHT, dtype=local.dtype, elements=n, read_bytes=nbytes,
        written_bytes=0.0,
    )  # fmt: skip


def _out_of_latent(cost: CostBuilder, hidden: int, latent: int, local: Local) -> None:
    """Adds the norm of the experts' sum and the way back to the width of the model."""
    t, dtype = local.shard_tokens, local.dtype
    state = t * latent * local.width
    cost.saved("routed_expert_norm.input", state)
    norm(cost, "routed_expert_norm", rows=t, width=latent, dtype=dtype)
    cost.saved("routed_expert_norm.out", state, tag="norm")
    linear(cost, "routed_expert_up_proj", rows=t, k=latent, n=hidden, dtype=dtype)
