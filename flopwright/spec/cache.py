"""Bytes of what attention keeps of a sequence: growing caches and fixed states."""

from __future__ import annotations

from flopwright.spec.model import Attention, KdaAttention, ModelSpec


def cache_bytes_per_token(attention: Attention, num_layers: int, bytes_per_value: int = 2) -> int:
    """Returns cache bytes a token of context over `num_layers` layers of this attention."""
    return attention.cache_values_per_token * num_layers * bytes_per_value


def sequence_cache_bytes(spec: ModelSpec, context: int, bytes_per_value: int = 2) -> int:
    """Returns cache bytes of one sequence of `context` tokens; windows bound what is kept.

    Layers with linear attention keep a state instead: `sequence_state_bytes`.
    """
    token = cache_bytes_per_token(spec.attention, 1, bytes_per_value)
    return sum(
        token * min(context, spec.sliding_window(layer) or context)
        for layer in range(spec.num_layers)
        if not isinstance(spec.attention_of(layer), KdaAttention)
    )


def sequence_state_bytes(
    spec: ModelSpec, bytes_per_value: int = 4, conv_bytes_per_value: int = 2
) -> tuple[int, int]:
    """Returns bytes of one sequence's (states, short convolutions) in linear attention."""
    linear = spec.linear_attention
    if linear is None:
        return 0, 0
    layers = spec.num_layers - spec.num_full_attention_layers
    states = recurrent_state_bytes(
        layers, linear.num_heads, linear.head_dim, linear.head_dim, bytes_per_value
    )
    return states, layers * linear.conv_values * conv_bytes_per_value


def recurrent_state_bytes(
    num_layers: int, num_heads: int, key_dim: int, value_dim: int, bytes_per_value: int
) -> int:
    """Returns bytes of a linear-attention state: one key_dim x value_dim matrix a head."""
    return num_layers * num_heads * key_dim * value_dim * bytes_per_value
