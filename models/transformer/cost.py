"""What one layer of a transformer costs: the rows that simulator and planner price.

Held equal to `module.py` by tests/unit/models: FLOPs are those of the matrix products that
the layer executes (rows whose time is bytes moved count none), kept bytes are the storages
that its ops save for the backward pass, parameters excluded, each once.
"""

from __future__ import annotations

from flopwright.models.attention_dsa.cost import sparse_latent_attention
from flopwright.models.attention_gqa.cost import grouped_query_attention
from flopwright.models.attention_kda.cost import delta_attention
from flopwright.models.attention_mla.cost import latent_attention
from flopwright.models.attn_res.cost import residual_mixture
from flopwright.models.embedding.cost import embeddings
from flopwright.models.head.cost import head
from flopwright.models.local import Local, add
from flopwright.models.mlp.cost import feed_forward
from flopwright.models.moe.cost import mixture_of_experts
from flopwright.models.mtp.cost import prediction_head, prediction_inputs
from flopwright.models.norm.cost import norm
from flopwright.ops import BlockCost, CostBuilder, Phase, ShardShape
from flopwright.spec.model import KdaAttention, MlaAttention, ModelSpec
from flopwright.spec.parameters import EMBEDDING_LAYER


def _attention_half(
    cost: CostBuilder, spec: ModelSpec, layer: int, local: Local, candidates: int
) -> None:
    hidden, shard = spec.hidden_size, local.shard_tokens
    state = shard * hidden * local.width
    cost.saved("input", state)
    if spec.attn_res_block is not None:
        sources = spec.residual_sources(layer)[0]
        residual_mixture(cost, "self_attention_res", sources, hidden, local)
    norm(cost, "input_layernorm", rows=shard, width=hidden, dtype=local.dtype, kind=spec.norm)
    cost.saved("input_layernorm.out", state, tag="norm")
    block, attn = CostBuilder(), spec.attention_of(layer)
    if isinstance(attn, MlaAttention) and attn.indexer is not None:
        sparse_latent_attention(block, attn, hidden, local)
    elif isinstance(attn, MlaAttention):
        latent_attention(block, attn, hidden, local)
    elif isinstance(attn, KdaAttention):
        delta_attention(block, attn, hidden, local)
    else:
        window = spec.sliding_window(layer)
        grouped_query_attention(block, attn, hidden, local, window)
    cost.extend(block.build(candidates), "self_attn.")
    if not spec.begins_block(layer):  # there the running sum begins with this result
        _residual(cost, "self_attn.residual", spec, local)


def _feed_forward_half(
    cost: CostBuilder, spec: ModelSpec, layer: int, local: Local, candidates: int
) -> None:
    hidden, shard = spec.hidden_size, local.shard_tokens
    state = shard * hidden * local.width
    cost.saved("hidden", state)
    if spec.attn_res_block is not None:
        sources = spec.residual_sources(layer)[1]
        residual_mixture(cost, "mlp_res", sources, hidden, local)
    norm(
        cost, "post_attention_layernorm", rows=shard, width=hidden, dtype=local.dtype,
        kind=spec.norm,
    )  # fmt: skip
    cost.saved("post_attention_layernorm.out", state, tag="norm")
    block = CostBuilder()
    if spec.is_moe_layer(layer):
        mixture_of_experts(block, spec, local)
    else:
        width, bias = spec.mlp.intermediate_size, spec.mlp.bias
        feed_forward(block, spec.mlp, hidden, width, local, bias=bias)
    cost.extend(block.build(candidates), "mlp.")
    _residual(cost, "mlp.residual", spec, local)


def _residual(cost: CostBuilder, name: str, spec: ModelSpec, local: Local) -> None:
    for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
        add(cost, name, phase, local.shard_tokens * spec.hidden_size, local)


def layer_cost(
    spec: ModelSpec, layer: int, shape: ShardShape, num_candidates: int = 1
) -> BlockCost:
    """Returns what one micro-batch costs in one layer on one rank.

    Args:
        layer: 0-based; -1 for the embeddings, spec.num_layers for final norm, head and loss,
            above that a multi-token-prediction module.
        shape: local shapes, each a number or an array of num_candidates.

    The life "input" of a layer is the tensor that full recompute keeps.
    """
    cost, local = CostBuilder(), Local(shape)
    if layer == EMBEDDING_LAYER:
        embeddings(cost, spec, local)
    elif layer == spec.num_layers:
        head(cost, spec, local)
    else:
        offset = layer - spec.num_layers
        if offset > 0:
            prediction_inputs(cost, spec, local, offset)
        _attention_half(cost, spec, layer, local, num_candidates)
        _feed_forward_half(cost, spec, layer, local, num_candidates)
        if offset > 0:
            prediction_head(cost, spec, local, offset, num_candidates)
    return cost.build(num_candidates)
