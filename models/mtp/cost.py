"""What a multi-token-prediction module costs beside its layer (arXiv 2412.19437, 2.2).

Before the layer: the next token's embedding and the state, each normalised, are projected from
[2 hidden] to [hidden]. Behind it: a norm, and the model's own head and loss once more, of the
positions that have a token so far behind them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flopwright.kernels.embedding.cost import embedding
from flopwright.kernels.linear.cost import linear
from flopwright.models.head.cost import HEAD_AGAIN, logits_and_loss
from flopwright.models.local import Local
from flopwright.models.norm.cost import norm
from flopwright.ops import CostBuilder
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.model import ModelSpec


def prediction_inputs(cost: CostBuilder, spec: ModelSpec, local: Local, offset: int) -> None:
    """Adds the rows of the lookup, the two norms and the projection of module `offset`.

    Each rank has its tokens / tp. What comes into the first was kept by the model's own head:
    "input", which full recompute keeps of a layer, is nothing more.
    """
    rows, hidden, dtype = local.shard_tokens, spec.hidden_size, local.dtype
    state = rows * hidden * local.width
    cost.saved("input", np.zeros_like(state))
    embedding(
        cost, "embed_tokens", tokens=local.tokens, vocab=local.vocab(spec.vocab_size),
        width=hidden, dtype=dtype,
    )  # fmt: skip
    if offset > 1:  # the first module's are the model's own state and the targets of its loss
        cost.saved("tokens", local.tokens * DTYPE_BYTES["int64"])
        cost.saved("hnorm.input", state, tag="norm")
    cost.saved("enorm.input", state)
    for name in ("hnorm", "enorm"):
        norm(cost, name, rows=rows, width=hidden, dtype=dtype, kind=spec.norm)
        cost.saved(f"{name}.out", state, tag="norm")
    linear(cost, "eh_proj", rows=rows, k=2 * hidden, n=hidden, dtype=dtype)


def prediction_head(
    cost: CostBuilder, spec: ModelSpec, local: Local, offset: int, num_candidates: int
) -> None:
    """Adds the rows of the norm, the head and the loss under the prefix `HEAD_AGAIN`."""
    rows, hidden, again = local.shard_tokens, spec.hidden_size, CostBuilder()
    state = rows * hidden * local.width
    again.saved("input", state)
    norm(again, "norm", rows=rows, width=hidden, dtype=local.dtype, kind=spec.norm)
    length = np.maximum(np.asarray(local.shape.seq_len, float) - offset, 0.0)
    shorter = Local(replace(local.shape, seq_len=length))
    again.saved("norm.out", shorter.shard_tokens * hidden * local.width, tag="norm")
    logits_and_loss(again, spec, shorter)
    cost.extend(again.build(num_candidates), HEAD_AGAIN)
