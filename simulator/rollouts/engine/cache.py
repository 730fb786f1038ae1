"""What a GPU's memory holds beside the weights: tokens of cache and states of sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flopwright.simulator.rollouts.engine.price import Served
from flopwright.simulator.rollouts.engine.weights import gpu_weight_bytes
from flopwright.spec.model import GqaAttention, MlaAttention
from flopwright.spec.rollouts.engine_served import CACHE_BYTES, KdaAttention, ServedModel


def token_bytes(model: ServedModel, tp: int = 1, keep_windows: bool = False) -> float:
    """Returns bytes that one more token of context occupies on each GPU of a tp group.

    Latents are kept whole on every GPU; heads are dealt, at least one to each. Layers with a
    window and recurrent ones keep no more for a longer context.
    """
    value = CACHE_BYTES[model.kv_dtype]
    total = 0.0
    for group in model.layers:
        attn = group.attention
        if isinstance(attn, MlaAttention):
            total += group.count * attn.cache_values_per_token * value
        elif isinstance(attn, GqaAttention) and (group.window is None or keep_windows):
            heads = max(attn.num_kv_heads / tp, 1.0)
            total += group.count * 2 * heads * attn.head_dim * value
    return total


def sequence_bytes(model: ServedModel, tp: int = 1, keep_windows: bool = False) -> float:
    """Returns bytes that a sequence occupies on each GPU at any length: windows and states."""
    total = 0.0
    for group in model.layers:
        attn = group.attention
        if isinstance(attn, KdaAttention):
            state = attn.state_values * CACHE_BYTES[model.state_dtype] + 2 * attn.conv_values
            total += group.count * state / tp
        elif isinstance(attn, GqaAttention) and group.window is not None and not keep_windows:
            heads = max(attn.num_kv_heads / tp, 1.0)
            per_token = 2 * heads * attn.head_dim * CACHE_BYTES[model.kv_dtype]
            total += group.count * per_token * group.window
    return total


@dataclass(frozen=True, slots=True)
class Memory:
    """One GPU's memory, in bytes, and what it holds of sequences.

    Attributes:
        cache_bytes: what is left for caches; negative where the weights alone do not fit.
        token_bytes, sequence_bytes: of one token and of one sequence at any length.
    """

    hbm_bytes: float
    weight_bytes: float
    workspace_bytes: float
    cache_bytes: float
    token_bytes: float
    sequence_bytes: float

    def tokens(self) -> int:
        """Returns tokens of cache that fit, states apart."""
        if self.token_bytes <= 0:
            return 0
        return max(math.floor(self.cache_bytes / self.token_bytes), 0)

    def sequences(self, context: float, block_tokens: int = 1) -> int:
        """Returns sequences of this context that fit on the GPU."""
        blocks = math.ceil(context / block_tokens) * block_tokens
        each = blocks * self.token_bytes + self.sequence_bytes
        return max(math.floor(self.cache_bytes / each), 0) if each > 0 else 2**31


def step_workspace_bytes(on: Served) -> float:
    """Returns bytes that the widest operator of a full step takes on a GPU.

    Every row that goes to an expert is kept four times: permuted in, both halves of the first
    product, the second's input and its output. Where tokens are gathered on all GPUs, room is
    kept for all their rows, since all might choose experts of one GPU.
    """
    widest = 0.0
    tokens = float(on.software.max_step_tokens)
    for group in on.model.layers:
        if group.moe is None:
            assert group.mlp is not None
            inner = group.mlp.intermediate_size / on.shape.tp
            widest = max(widest, tokens * 2 * (2 * on.model.hidden_size + 3 * inner))
            continue
        form = on.model.format_of("expert").bits_per_weight / 8
        width = group.latent_size or on.model.hidden_size
        inner = group.moe.expert_intermediate_size / on.shape.expert_tp
        rows = tokens * group.moe.top_k * on.shape.dp
        if on.software.exchange == "deepep":
            rows /= on.shape.ep
        narrow = min(form, 2.0)
        widest = max(widest, rows * (width * (narrow + 2.0) + inner * (4.0 + narrow)))
    return widest


def memory(on: Served) -> Memory:
    """Returns the memory of the fullest GPU of an instance under the engine's rule."""
    gpu, engine = on.cluster.node.gpu, on.software
    weights = gpu_weight_bytes(on.model, on.shape)
    workspace = float(engine.workspace_bytes) + step_workspace_bytes(on)
    if engine.memory_share == "of_free":
        left = engine.memory_fraction * (gpu.hbm_bytes - gpu.reserved_bytes - weights - workspace)
    else:
        left = engine.memory_fraction * gpu.hbm_bytes - weights - workspace
    return Memory(
        hbm_bytes=float(gpu.hbm_bytes),
        weight_bytes=weights,
        workspace_bytes=workspace,
        cache_bytes=left,
        token_bytes=token_bytes(on.model, on.shape.tp, engine.keeps_windows),
        sequence_bytes=sequence_bytes(on.model, on.shape.tp, engine.keeps_windows),
    )
