"""What the final norm, the output head and the loss cost and keep."""

from __future__ import annotations

import numpy as np

from flopwright.kernels.cross_entropy.cost import cross_entropy
from flopwright.kernels.linear.cost import linear
from flopwright.kernels.linear_cross_entropy.cost import linear_cross_entropy
from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.models.attn_res.cost import residual_mixture
from flopwright.models.local import Local, gather
from flopwright.models.norm.cost import norm
from flopwright.ops import Collective, CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.model import ModelSpec

# Prefix of the rows of a head that a multi-token-prediction module uses once more.
HEAD_AGAIN = "shared_head."
# Of its part of the vocabulary a rank tells the others the log-sum-exp and the target's logit.
_NUMBERS_A_TOKEN = 2
# Head and loss in one tell it in two parts, the largest logit and what is above it.
_NUMBERS_IN_ONE = 3


def head(cost: CostBuilder, spec: ModelSpec, local: Local) -> None:
    """Adds the rows of layer num_layers; the vocabulary is cut over tp, and so are the logits."""
    shard, hidden = local.shard_tokens, spec.hidden_size
    cost.saved("input", shard * hidden * local.width)
    if spec.attn_res_block is not None:
        sources = spec.residual_sources(spec.num_layers)[0]
        residual_mixture(cost, "output_attn_res", sources, hidden, local)
    norm(cost, "norm", rows=shard, width=hidden, dtype=local.dtype, kind=spec.norm)
    cost.saved("norm.out", shard * hidden * local.width, tag="norm")
    logits_and_loss(cost, spec, local)


def logits_and_loss(cost: CostBuilder, spec: ModelSpec, local: Local) -> None:
    """Adds the rows from the normalised state on: the product with the table, and the loss.

    Candidates with `fused_loss` have both in one op, which keeps no logits.
    """
    fused = np.asarray(local.shape.fused_loss, bool)
    if not fused.any():
        _apart(cost, spec, local)
        return
    if fused.all():
        _in_one(cost, spec, local)
        return
    for rows, share in ((_apart, ~fused), (_in_one, fused)):
        part = CostBuilder()
        rows(part, spec, local)
        cost.extend(part.build(fused.size), repeat=share.astype(float))


def _apart(cost: CostBuilder, spec: ModelSpec, local: Local) -> None:
    hidden, t, dtype, vocab = (
        spec.hidden_size,
        local.tokens,
        local.dtype,
        local.vocab(spec.vocab_size),
    )
    gather(cost, "lm_head", local, hidden)
    linear(cost, "lm_head", rows=t, k=hidden, n=vocab, dtype=dtype)
    cost.saved("logits", t * vocab * local.width)
    cross_entropy(cost, "loss", tokens=t, vocab=vocab, dtype=dtype)
    _join_parts(cost, local, _NUMBERS_A_TOKEN)
    cost.saved("targets", t * DTYPE_BYTES["int64"])
    cost.saved("loss.lse", t * wide_bytes(dtype))


def _in_one(cost: CostBuilder, spec: ModelSpec, local: Local) -> None:
    t, dtype, vocab = local.tokens, local.dtype, local.vocab(spec.vocab_size)
    gather(cost, "lm_head", local, spec.hidden_size, together=True)
    linear_cross_entropy(
        cost, "lm_head.loss", tokens=t, hidden=spec.hidden_size, vocab=vocab, dtype=dtype
    )
    _join_parts(cost, local, _NUMBERS_IN_ONE)
    cost.saved("targets", t * DTYPE_BYTES["int64"])
    cost.saved("loss.lse", 2 * t * wide_bytes(dtype))


def _join_parts(cost: CostBuilder, local: Local, numbers: int) -> None:
    """Adds what brings the ranks' log-sum-exps and the targets' logits together."""
    nbytes = numbers * local.tokens * wide_bytes(local.dtype) * local.tp
    count = np.where(local.tp > 1, 1.0, 0.0)
    cost.comm("loss", Collective.ALL_GATHER, "tp", Phase.FORWARD, nbytes=nbytes, count=count)
