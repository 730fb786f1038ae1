"""What one layer keeps for its backward pass under a software stack's habits.

Starts from the rows that models/transformer/cost.py gives for our own modules and changes
them where the stack allocates otherwise. For a GPT layer with dropout and unfused attention
the sum is Megatron's s b h (34 + 5 a s / h) (arXiv 2205.05198, equation 1), which a test holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from flopwright.models.local import Local
from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import Array, ShardShape, TensorLife
from flopwright.plan.parallel import SELECTIVE_TAGS, ParallelPlan
from flopwright.simulator.memory.profile import MemoryProfile
from flopwright.simulator.training.recompute import Bools, in_group
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.model import GqaAttention, ModelSpec
from flopwright.spec.parameters import EMBEDDING_LAYER

# Inputs of matrix products: what an FP8 product keeps in FP8.
_PRODUCT_INPUTS: Final = re.compile(
    r"(layernorm\.out|^mlp\.(shared_experts\.)?inner|experts\.inner|experts\.input)$"
)
_LOGITS: Final = re.compile(r"(^|\.)(logits|loss\.lse)$")
# E4M3 and its scales: one a tensor (none to count), or one of 4 bytes for 128 numbers.
_FP8_BYTES: Final = 1 + 4 / 128
_MASK_BYTES: Final = 1  # a dropout mask's element

# Every second matrix product of a layer from the first on, and attention; w2's output apart.
_SECOND_PRODUCTS: Final = re.compile(
    r"(^input|\.q|\.v|attention\.(out|lse)|gate_proj\.out|down_proj\.out"
    r"|q_a_proj\.out|kv_a_proj_with_mqa\.out|experts\.gate_up|experts\.input|gate\.\w+|order|place)$"
)


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """Bytes by candidate: what stays from forward to backward, and what it is when whole."""

    kept: Array
    whole: Array


def stack_lives(
    spec: ModelSpec,
    layer: int,
    shape: ShardShape,
    profile: MemoryProfile,
    *,
    fp8: bool = False,
    frozen: bool = False,
) -> TensorLife:
    """Returns a layer's saved tensors, the logits apart, as `profile` keeps them.

    Args:
        fp8: matrix products run in FP8.
        frozen: only adapters are trained (LoRA).
    """
    lives = layer_cost(spec, layer, shape, 1).lives
    rows = {
        name: _Row(tag, float(nbytes[0]), bool(on))
        for name, tag, nbytes, on in zip(
            lives.name, lives.tag, lives.bytes, lives.fp8, strict=True
        )
    }
    for name in [n for n in rows if _LOGITS.search(n)]:
        del rows[name]
    if layer != spec.num_layers:
        _as_stack(rows, spec, layer, Local(shape), profile)
        if fp8 and profile.fp8_inputs:
            _in_fp8(rows, DTYPE_BYTES[shape.dtype])
        if frozen:
            _freeze(rows, profile)
    return TensorLife(
        name=tuple(rows),
        cls=("activation",) * len(rows),
        tag=tuple(r.tag for r in rows.values()),
        fp8=np.array([r.fp8 for r in rows.values()], bool),
        bytes=np.array([[r.nbytes] for r in rows.values()]).reshape(len(rows), 1),
    )


@dataclass(slots=True)
class _Row:
    tag: str
    nbytes: float
    fp8: bool = False


def _as_stack(
    rows: dict[str, _Row], spec: ModelSpec, layer: int, local: Local, profile: MemoryProfile
) -> None:
    dropout = profile.dropout and spec.positions == "learned"
    state = float(local.shard_tokens) * spec.hidden_size
    if layer == EMBEDDING_LAYER:
        if dropout:
            rows["dropout.mask"] = _Row("", state * _MASK_BYTES)
        return
    if dropout:
        for half in ("self_attn", "mlp"):
            rows[f"{half}.dropout.mask"] = _Row("", state * _MASK_BYTES)
    if profile.attention == "unfused":
        _scores(rows, spec, local, dropout)
    if profile.eager:
        _eager(rows, spec, local)
    if not profile.expert_outputs:
        rows.pop("mlp.experts.out", None)


def _scores(rows: dict[str, _Row], spec: ModelSpec, local: Local, dropout: bool) -> None:
    """Softmax output; with dropout its mask and the dropped scores too: 5 a s^2 b bytes."""
    queries, keys = float(local.tokens), float(np.asarray(local.shape.seq_len, float))
    elements = queries * keys * spec.attention.num_heads / float(local.tp)
    prefix = "self_attn.attention."
    rows[prefix + "scores"] = _Row("", elements * local.width)
    if dropout:
        rows[prefix + "score_masks"] = _Row("", elements * _MASK_BYTES)
        rows[prefix + "masked_scores"] = _Row("", elements * local.width)
    rows.pop(prefix + "lse", None)


def _eager(rows: dict[str, _Row], spec: ModelSpec, local: Local) -> None:
    """Adds the activated gate and keys and values repeated to every head."""
    for prefix in ("mlp.", "mlp.shared_experts."):
        if spec.mlp.gated and f"{prefix}inner" in rows:
            inner = rows[f"{prefix}inner"]
            rows[f"{prefix}activated_gate"] = _Row(inner.tag, inner.nbytes)
    if "mlp.experts.inner" in rows:
        inner = rows["mlp.experts.inner"]
        rows["mlp.experts.activated_gate"] = _Row(inner.tag, inner.nbytes)
    attention = spec.attention
    if isinstance(attention, GqaAttention):
        heads = attention.num_heads / float(local.tp)
        whole = float(local.tokens) * heads * attention.head_dim * local.width
        for name in ("self_attn.k", "self_attn.v"):
            repeated = max(whole - rows[name].nbytes, 0.0)
            rows[f"{name}_repeated"] = _Row("", repeated)


def _in_fp8(rows: dict[str, _Row], width: int) -> None:
    for name, row in rows.items():
        if _PRODUCT_INPUTS.search(name):
            row.nbytes *= _FP8_BYTES / width
    out = rows.get("self_attn.attention.out")
    if out is not None:  # attention's backward reads it too, so it is kept twice
        rows["self_attn.o_proj.input"] = _Row("", out.nbytes * _FP8_BYTES / width)


def _freeze(rows: dict[str, _Row], profile: MemoryProfile) -> None:
    """A weight that is not trained needs no input; an adapter beside it does."""
    if profile.lora == "all":
        return
    for name in [n for n in rows if re.search(r"inner$", n)]:
        del rows[name]


def kept_bytes(
    lives: TensorLife, plan: ParallelPlan, profile: MemoryProfile, kind: str
) -> KeptLayer:
    """Returns what a transformer layer of that kind keeps under the plan's recompute policy."""
    whole = np.asarray(lives.bytes.sum(axis=0))
    if plan.recompute == "none":
        return KeptLayer(whole, whole)
    if plan.recompute == "full":
        mask = np.array([name == "input" for name in lives.name])
    elif plan.recompute_tags or profile.selective != "second_products":
        mask = ~dropped(lives, _tags(plan, profile), kind)
    else:
        mask = np.array([bool(_SECOND_PRODUCTS.search(n)) for n in lives.name])
    kept = np.asarray(lives.bytes[mask].sum(axis=0))
    if plan.recompute == "selective" and not plan.recompute_tags:
        kept = kept + _second_output(lives, profile)
    return KeptLayer(kept, whole)


def _tags(plan: ParallelPlan, profile: MemoryProfile) -> frozenset[str]:
    if plan.recompute_tags:
        return frozenset(plan.recompute_tags)
    return frozenset({"core_attn"}) if profile.selective == "core_attention" else SELECTIVE_TAGS


def dropped(lives: TensorLife, tags: frozenset[str], kind: str) -> Bools:
    """Returns which rows a list of recompute groups drops in a layer of that kind."""
    return np.array(
        [
            any(in_group(group, tag, name, kind) for group in tags)
            for name, tag in zip(lives.name, lives.tag, strict=True)
        ],
        bool,
    )


def _second_output(lives: TensorLife, profile: MemoryProfile) -> Array:
    """The output of down_proj is one of the second products, and kept: as large as the input."""
    if profile.selective != "second_products":
        return np.zeros(lives.bytes.shape[1])
    mask = np.array([name == "input" for name in lives.name])
    return np.asarray(lives.bytes[mask].sum(axis=0))
