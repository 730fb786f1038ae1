"""Seconds of attention in an engine: new tokens over a cache, and prompts over themselves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from flopwright.ops import Array, CostBuilder, OpKind, Phase
from flopwright.simulator.operators.times import op_seconds
from flopwright.simulator.rollouts.engine.curves import DecodeCurve, slower_than_tables
from flopwright.simulator.rollouts.engine.rows import Load
from flopwright.spec.model import GqaAttention, MlaAttention
from flopwright.spec.rollouts.engine_served import CACHE_BYTES, KdaAttention, ServedLayers

if TYPE_CHECKING:
    from flopwright.simulator.rollouts.engine.price import Served

# A part with few FLOPs for its bandwidth is kept busy: 0.93 of the peak on H20 (16 ms for
# 2.2e12 FLOPs, flash-attention issue 1572), where 0.5 is what the tables' parts reach.
_MOST_OF_PEAK: Final = 0.93
_LATENT_TILE: Final = 64.0  # FlashMLA computes 64 queries at once


def _curve(on: Served, kind: str, width: int) -> DecodeCurve:
    """Returns the decode curve of the cache's dtype and the nearest width."""
    mine = [c for c in on.curves.decode if c.kind == kind]
    dtype = on.model.kv_dtype

    def distance(c: DecodeCurve) -> tuple[bool, float]:
        return c.kv_dtype != dtype, abs(math.log(c.head_dim / width)) if c.head_dim else 0.0

    found = min(mine, key=distance)
    share = on.software.fp8_cache_share
    if dtype == "fp8" and kind == "gqa" and share is not None:
        wide = min((c for c in mine if c.kv_dtype == "bf16"), key=lambda c: distance(c)[1])
        better = {"memory_efficiency": min(wide.memory_efficiency * share, 1.0)}
        return found.model_copy(update=better)
    return found


def seen_tokens(window: int | None, attempts: Array, context: Array) -> Array:
    """Returns tokens of cache that the layers read: contexts, each cut at the window."""
    return context if window is None else np.minimum(context, attempts * float(window))


def _most_seen(group: ServedLayers) -> int | None:
    """Returns how many positions a query attends to at most: its window, or what is chosen."""
    attn = group.attention
    index = attn.indexer if isinstance(attn, MlaAttention) else None
    return group.window if index is None else index.top_k


def decode_seconds(on: Served, group: ServedLayers, loads: Load) -> Array:
    """Returns the seconds of one layer's attention of decoding sequences over their caches.

    floor + row_s * sequences * cached heads + max(cache bytes / bandwidth, FLOPs / rate), of
    the heads of one tp rank. An indexer reads a key of every position, and attention then only
    what it chose. Nothing where none decodes; recurrent layers have no cache.
    """
    attn, tp, gpu = group.attention, on.shape.tp, on.cluster.node.gpu
    if isinstance(attn, KdaAttention):
        return np.zeros(loads.size)
    value = CACHE_BYTES[on.model.kv_dtype]
    seen = seen_tokens(_most_seen(group), loads.attempts, loads.context_tokens)
    heads = attn.num_heads / tp
    tile = float(on.software.decode_tile_rows)
    if isinstance(attn, MlaAttention):
        latent = attn.kv_lora_rank + attn.qk_rope_head_dim
        curve = _curve(on, "mla", latent)
        lanes, per_token = loads.attempts, float(latent)
        rows = np.maximum(heads * loads.step_tokens, min(tile, _LATENT_TILE))
        widths = latent + attn.kv_lora_rank
        stream = on.software.latent_decode_share
    else:
        curve = _curve(on, "gqa", attn.head_dim)
        kv_heads = max(attn.num_kv_heads / tp, 1.0)
        lanes, per_token = loads.attempts * kv_heads, 2.0 * kv_heads * attn.head_dim
        rows = np.maximum(heads * loads.step_tokens, tile * kv_heads)
        widths = 2 * attn.head_dim
        stream = on.software.decode_share
    moved = seen * per_token * value
    flops = 2.0 * seen * rows * widths
    if isinstance(attn, MlaAttention) and attn.indexer is not None:  # whole on every GPU
        index, every = attn.indexer, loads.context_tokens
        moved = moved + every * index.head_dim * value
        flops = flops + 2.0 * every * index.num_heads * index.head_dim * loads.step_tokens
    peak = {str(k): v for k, v in gpu.peak_flops_per_s.items()}["bf16"]
    share = min(curve.max_efficiency / slower_than_tables(gpu, "bf16"), _MOST_OF_PEAK)
    streamed = gpu.hbm_bytes_per_s * min(curve.memory_efficiency * stream, 1.0)
    work = np.maximum(moved / streamed, flops / (peak * share))
    once = curve.floor_s + curve.row_s * lanes + work
    return np.asarray(np.where(loads.attempts > 0, once, 0.0))


def prefill_seconds(on: Served, group: ServedLayers, loads: Load) -> Array:
    """Returns the seconds of one layer's causal attention of prompts, latent ones expanded."""
    attn, tp = group.attention, on.shape.tp
    if isinstance(attn, KdaAttention) or not loads.prompt_tokens.any():
        return np.zeros(loads.size)
    tokens = loads.prompt_tokens
    pairs, seen = loads.prompt_pairs, loads.prompt_context
    index = attn.indexer if isinstance(attn, MlaAttention) else None
    if index is not None:
        pairs = np.minimum(pairs, tokens * index.top_k)
    if group.window is not None:
        pairs = np.minimum(pairs, tokens * group.window)
        seen = np.minimum(seen, tokens + loads.prompts * group.window)
    heads = attn.num_heads / tp
    kv_heads = max(attn.num_kv_heads / tp, 1.0) if isinstance(attn, GqaAttention) else heads
    count = np.maximum(loads.prompts, 1.0)
    wide = 0.0 if index is None else float(index.num_heads * index.head_dim)
    scores = 2 * loads.prompt_pairs * wide
    cost = CostBuilder()
    cost.op(
        "self_attn.core", OpKind.ATTENTION, Phase.FORWARD, dtype="bf16",
        m=tokens / count, n=seen / count, k=attn.qk_head_dim, batch=heads * count,
        flops=2 * heads * pairs * (attn.qk_head_dim + attn.v_head_dim) + scores,
        read_bytes=2 * (tokens * heads * attn.qk_head_dim
                        + seen * kv_heads * (attn.qk_head_dim + attn.v_head_dim)),
        written_bytes=2 * tokens * heads * attn.v_head_dim,
        count=np.where(tokens > 0, 1.0, 0.0),
    )  # fmt: skip
    table = cost.build(loads.size).ops
    return np.asarray(op_seconds(table, on.cluster.node.gpu, on.kernels()).seconds[0])
