"""What the embeddings cost and keep: the tokens, nothing else."""

from __future__ import annotations

from flopwright.kernels.embedding.cost import embedding
from flopwright.models.local import Local, add, scatter
from flopwright.ops import CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.model import ModelSpec


def embeddings(cost: CostBuilder, spec: ModelSpec, local: Local) -> None:
    """Adds the rows of the token table, cut by vocabulary over tp, and of learned positions."""
    hidden = spec.hidden_size
    embedding(
        cost,
        "embed_tokens",
        tokens=local.tokens,
        vocab=local.vocab(spec.vocab_size),
        width=hidden,
        dtype=local.dtype,
    )
    cost.saved("tokens", local.tokens * DTYPE_BYTES["int64"])
    scatter(cost, "embed_tokens", local, hidden)
    if spec.positions == "learned":
        add(cost, "embed_positions", Phase.FORWARD, local.shard_tokens * hidden, local)
