"""What a layer's backward pass holds for a moment beyond what the forward pass kept.

One row a moment, of class "temporary": the tensors alive then, less what the layer itself has
let go by then. Moments do not add: a layer's temporaries are its fullest one. Gradients of
weights are among them until they are summed into their place. Held equal to torch's
MemTracker by tests/unit/models. Only moments that can be the fullest are rows: by the time
attention runs backward its layer has let the larger feed-forward half go.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwright.kernels.linear_cross_entropy.cost import scratch_bytes
from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.models.local import Local
from flopwright.ops import Array, CostBuilder, ShardShape, TensorLife
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import EMBEDDING_LAYER

CLASS = "temporary"


@dataclass(frozen=True)
class _Moments:
    """Collects a layer's moments.

    Attributes:
        held: bytes alive through all of them (gradients that wait for later).
        weights: 1 where the gradient of a weight is a tensor of its own until it is summed
            into its place, 0 where the product adds to that place.
    """

    cost: CostBuilder
    local: Local
    held: Array
    weights: float = 1.0

    def row(self, name: str, values: Array, other_bytes: Array | float = 0.0) -> None:
        """Adds a moment of so many values of the compute dtype and other bytes."""
        nbytes = self.held + values * self.local.width + other_bytes
        self.cost.saved(name, np.maximum(nbytes, 0.0), cls=CLASS)


def backward_moments(
    spec: ModelSpec,
    layer: int,
    shape: ShardShape,
    num_candidates: int = 1,
    *,
    fused_weight_gradients: bool = False,
) -> TensorLife:
    """Returns the moments of one layer's backward pass, in their order.

    Args:
        layer: 0-based; -1 for the embeddings, spec.num_layers for final norm, head and loss.
        shape: local shapes, each a number or an array of num_candidates.
        fused_weight_gradients: a matrix's gradient is added to its place by the product that
            makes it (not so in our own executor); the table's gradient is not.
    """
    local, cost = Local(shape), CostBuilder()
    weights = 0.0 if fused_weight_gradients else 1.0
    state = local.shard_tokens * spec.hidden_size * local.width
    if layer == EMBEDDING_LAYER:
        table = local.vocab(spec.vocab_size) * spec.hidden_size
        _Moments(cost, local, state).row("embed_tokens", table)
    if layer >= spec.num_layers:  # a multi-token-prediction module has a head too
        _head(_Moments(cost, local, np.zeros_like(state), weights), spec)
    if layer in {EMBEDDING_LAYER, spec.num_layers}:
        return cost.build(num_candidates).lives
    if spec.is_moe_layer(layer):
        _mixture(_Moments(cost, local, state, weights), spec)
    else:
        # The gradient of the layer's output waits for the residual sum.
        moments = _Moments(cost, local, state, weights)
        _feed_forward(moments, spec, spec.mlp.intermediate_size, "mlp.")
    return cost.build(num_candidates).lives


def _head(moments: _Moments, spec: ModelSpec) -> None:
    """The loss turns the logits into probabilities; the head makes its weight's gradient.

    In one op both gradients are made together, with a part of the logits' gradient between.
    """
    local, t = moments.local, moments.local.tokens
    wide, fused = wide_bytes(local.dtype), np.asarray(local.shape.fused_loss, float)
    logits = t * local.vocab(spec.vocab_size) * (1 - fused)
    # Autograd fills a gradient of the log-sum-exp that nobody asked for; narrow logits are
    # widened beside their difference to it, wide ones get a column of -1 for the targets.
    unused = wide * t
    if local.width < wide:
        moments.row("loss", 0.0 * logits, 2 * wide * logits + unused)
    else:
        moments.row("loss", logits + t, unused)
    weight = moments.weights * local.vocab(spec.vocab_size) * spec.hidden_size
    # The gradient of the logits stands where the logits were.
    together = np.zeros(())
    if fused.any():
        together = fused * _head_in_one(local, spec)
    moments.row("lm_head", t * spec.hidden_size + weight, together - wide * t * (1 - fused))


def _head_in_one(local: Local, spec: ModelSpec) -> Array:
    """Returns the bytes beside both gradients: a part of the logits', and sums in fp32.

    Narrow inputs: the gradient of the states is summed wide, product by product.
    """
    t, wide = local.tokens, wide_bytes(local.dtype)
    sums = 2 * wide - local.width if local.width < wide else 0
    part = scratch_bytes(t, local.vocab(spec.vocab_size), local.dtype)
    unused = 2 * wide * t  # the log-sum-exp's gradient, in two parts
    return np.asarray(sums * t * spec.hidden_size + part + unused)


def _feed_forward(moments: _Moments, spec: ModelSpec, width: int, prefix: str) -> None:
    local, hidden = moments.local, spec.hidden_size
    t, n = local.tokens, width / local.tp
    inner, weight, whole = t * n, moments.weights * n * hidden, t * hidden
    # A cut layer gathers the gradient of its scattered output.
    gathered = np.where(np.logical_and(local.tp > 1, local.sequence_parallel), whole, 0.0)
    moments.row(f"{prefix}down_proj", gathered + inner + weight)
    if spec.mlp.gated:
        moments.row(f"{prefix}swiglu", gathered + 3 * inner - inner)
        moments.row(f"{prefix}up_proj", whole + weight + 2 * inner - 3 * inner)
    else:
        moments.row(f"{prefix}gelu", gathered + 2 * inner - inner)
        moments.row(f"{prefix}up_proj", whole + weight + inner - 2 * inner)


def _mixture(moments: _Moments, spec: ModelSpec) -> None:
    """Shared experts run backward first; then the experts' results, products and inputs."""
    moe, local, hidden = spec.moe, moments.local, spec.hidden_size
    assert moe is not None
    shard, m = local.shard_tokens, moe.expert_intermediate_size
    rows, experts = shard * moe.top_k, moe.num_experts / local.ep
    # Rows at the busiest rank, and its part of each expert's width.
    arrived = rows * local.etp * np.asarray(local.shape.expert_load, float)
    width = m / local.etp
    if moe.num_shared_experts:
        shared = moe.num_shared_experts * m
        _feed_forward(moments, spec, shared, "mlp.shared_experts.")
        kept = (3 if spec.mlp.gated else 2) * local.tokens * shared / local.tp
        waits = shard * hidden  # the gradient of the block's input, for its sum
        held = moments.held + (waits - kept) * local.width
        moments = _Moments(moments.cost, local, held, moments.weights)
    inside = moe.latent_size or hidden
    out, inner = arrived * inside, arrived * width
    matrices = moments.weights * experts * width * inside
    # Each row's gradient, its product with the row, and the sums of that for the weights.
    moments.row("mlp.unpermute", 2 * rows * inside, rows * wide_bytes(local.dtype))
    moments.row("mlp.experts.down_proj", inner + matrices)
    moments.row("mlp.experts.swiglu", 5 * inner - out - inner)
    moments.row("mlp.experts.gate_up_proj", 2 * matrices - inner)


def fullest(moments: TensorLife) -> Array:
    """Returns the bytes of the fullest moment by candidate."""
    return np.asarray(moments.bytes.max(axis=0))
