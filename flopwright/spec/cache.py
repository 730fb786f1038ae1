"""Bytes of what attention keeps of a sequence: growing caches and fixed states."""

from __future__ import annotations

from flopwright.spec.model import Attention, ModelSpec


def cache_bytes_per_token(attention: Attention, num_layers: int, bytes_per_value: int = 2) -> int:
    """Returns cache bytes a token of context over `num_layers` layers of this attention."""
    return attention.cache_values_per_token * num_layers * bytes_per_value


def sequence_cache_bytes(spec: ModelSpec, context: int, bytes_per_value: int = 2) -> int:
    """Returns cache bytes of one sequence of `context` tokens; windows bound what is kept."""
    token = cache_bytes_per_token(spec.attention, 1, bytes_per_value)
    return sum(
        token * min(context, spec.sliding_window(layer) or context)
        for layer in range(spec.num_layers)
    )


def recurrent_state_bytes(
    num_layers: int, num_heads: int, key_dim: int, value_dim: int, bytes_per_value: int
) -> int:
    """Returns bytes of a linear-attention state: one key_dim x value_dim matrix a head."""
    return num_layers * num_heads * key_dim * value_dim * bytes_per_value
