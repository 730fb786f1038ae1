"""What a step of training a draft head costs: the frozen model once forward, the head unrolled.

Held equal to `module.py` by tests/unit/models/test_draft_head.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

import numpy as np

from flopwright.kernels.linear.cost import linear
from flopwright.kernels.lk_loss.cost import linear_lk_loss
from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.models.draft.depths import DEPTHS, STEPS
from flopwright.models.head.cost import HEAD_AGAIN
from flopwright.models.local import Local
from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import BlockCost, CostBuilder, OpKind, OpTable, Phase, ShardShape
from flopwright.spec.model import MlaAttention, ModelSpec
from flopwright.spec.parameters import EMBEDDING_LAYER, layer_parameters

TARGET: Final = "target."  # prefix of the frozen model's rows
_NUMBERS: Final = 6  # a token that the loss keeps beside both sides


def head_spec(spec: ModelSpec) -> ModelSpec:
    """Returns a model with one prediction module of the kind that a draft head trains."""
    attention = spec.attention
    if isinstance(attention, MlaAttention):
        attention = attention.model_copy(update={"indexer": None})
    changes = {"attention": attention, "mtp_layers": 1, "attn_res_block": None}
    return spec.model_copy(update=changes)


def draft_params(spec: ModelSpec) -> int:
    """Returns the weights that are trained: the module's, and the projection of the features."""
    own = sum(p.numel for p in layer_parameters(head_spec(spec), spec.num_layers + 1))
    return own + DEPTHS * spec.hidden_size**2


def draft_cost(spec: ModelSpec, shape: ShardShape, steps: int = STEPS) -> BlockCost:
    """Returns the rows of one micro-batch on one rank that holds the whole model.

    The frozen model runs forward and keeps nothing. The head's layer runs in every step over
    all tokens, from the second on with the chain of its own drafts beside the context; step j's
    loss counts seq_len - j of them.
    """
    cost, plain = CostBuilder(), head_spec(spec)
    kinds = Counter(_like(spec, n) for n in range(EMBEDDING_LAYER, spec.num_layers))
    for layer, count in kinds.items():
        _forward_only(cost, layer_cost(spec, layer, shape).ops, TARGET, float(count))
    _norm_only(cost, layer_cost(spec, spec.num_layers, shape).ops)
    local, hidden = Local(shape), spec.hidden_size
    state, wide = local.tokens * hidden * local.width, wide_bytes(local.dtype)
    linear(
        cost, "features", rows=local.tokens, k=DEPTHS * hidden, n=hidden, dtype=local.dtype,
        input_gradient=False,
    )  # fmt: skip
    cost.saved("features.input", DEPTHS * state)
    module = layer_cost(plain, spec.num_layers + 1, shape)
    for step in range(1, steps + 1):
        name = f"step{step}."
        cost.extend(_without_head(module, chained=step > 1), name)
        cost.saved(f"{name}hnorm.input", state)  # the features, or the step's before
        if step > 1:
            _chain(cost, plain, local, step)
        shorter = Local(replace(shape, seq_len=np.asarray(shape.seq_len, float) - step)).tokens
        linear_lk_loss(
            cost, f"{name}loss", tokens=shorter, hidden=hidden, vocab=spec.vocab_size,
            dtype=local.dtype,
        )  # fmt: skip
        cost.saved(f"{name}loss.sides", 2 * shorter * hidden * local.width)
        cost.saved(f"{name}loss.kept", _NUMBERS * shorter * wide)
    return cost.build(1)


def _like(spec: ModelSpec, layer: int) -> int:
    """Returns the first layer that costs what this one does."""
    if layer == EMBEDDING_LAYER:
        return layer

    def kind(n: int) -> tuple[object, ...]:
        attention = spec.attention_of(n).kind, spec.sliding_window(n)
        return (spec.is_moe_layer(n), *attention, spec.residual_sources(n), spec.begins_block(n))

    return next(n for n in range(spec.num_layers) if kind(n) == kind(layer))


def _forward_only(cost: CostBuilder, ops: OpTable, prefix: str, repeat: float) -> None:
    forward = (ops.phase == Phase.FORWARD)[:, None]
    kept = replace(ops, count=np.where(forward, ops.count, 0.0))
    empty = CostBuilder().build(1)
    cost.extend(replace(empty, ops=kept), prefix, repeat)


def _norm_only(cost: CostBuilder, ops: OpTable) -> None:
    """Adds the model's last norm; its head is met in the loss."""
    own = np.array([not n.startswith(("lm_head", "loss")) for n in ops.name])[:, None]
    _forward_only(cost, replace(ops, count=np.where(own, ops.count, 0.0)), TARGET, 1.0)


def _without_head(block: BlockCost, chained: bool) -> BlockCost:
    """Returns a prediction module's cost without the head, its norm apart.

    Args:
        chained: its keys and values are kept in the chain.
    """
    leaves = ("lm_head", "loss", "logits", "targets", "norm.out")
    again = tuple(f"{HEAD_AGAIN}{leaf}" for leaf in leaves)
    gone = (*again, *(("self_attn.k", "self_attn.v") if chained else ()))
    rows = np.array([not n.startswith(again) for n in block.ops.name])[:, None]
    lives = np.array([n not in gone and not n.startswith(again) for n in block.lives.name])
    return replace(
        block,
        ops=replace(block.ops, count=np.where(rows, block.ops.count, 0.0)),
        lives=replace(block.lives, bytes=np.where(lives[:, None], block.lives.bytes, 0.0)),
    )


def _chain(cost: CostBuilder, spec: ModelSpec, local: Local, step: int) -> None:
    """Adds attention over the chain: one key and value a link, place and head."""
    attn, links, t = spec.attention, step - 1, local.tokens
    groups = attn.num_heads if isinstance(attn, MlaAttention) else attn.num_kv_heads
    pairs = links * t * attn.num_heads
    widths = attn.qk_head_dim + attn.v_head_dim
    moved = links * t * groups * widths * local.width
    for phase, times in ((Phase.FORWARD, 1), (Phase.BACKWARD_INPUT, 2)):
        cost.op(
            f"step{step}.self_attn.chain", OpKind.MEMORY_BOUND, phase, dtype=local.dtype,
            m=pairs * widths, read_bytes=times * moved, written_bytes=(times - 1) * moved,
        )  # fmt: skip
    cost.saved(f"step{step}.self_attn.chain", moved)
