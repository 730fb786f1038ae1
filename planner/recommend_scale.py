"""Models of a family at other sizes: more layers and width in the proportions of one of them."""

from __future__ import annotations

import math
from typing import Any, Final

from flopwright.spec.model import GqaAttention, MlaAttention, ModelSpec
from flopwright.spec.parameters import num_active_params
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import Document

# Heads move in steps that tensor parallelism within a node divides, where the family's do.
_HEAD_STEP: Final = 8
_WIDTH_STEPS: Final = (64, 8, 2)
MAX_SCALED_LAYERS: Final = 2_000


def scaled(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """Returns the family's model with so many layers, its width grown by the same factor.

    Depth and the number of heads grow together (so weights grow as the cube); the width of a
    head, key-value heads, experts, the chosen ones, latent key-value rank, vocabulary and
    leading dense layers stay. Hidden size, feed-forward widths and the query rank follow the
    heads. At the model's own number of layers it is the model itself.
    """
    if num_layers == spec.num_layers:
        return spec
    heads = _heads(spec, num_layers / spec.num_layers)
    width = heads / spec.attention.num_heads
    hidden = _width(spec.hidden_size, width)
    data = spec.to_data()
    data |= {
        "name": f"{spec.name}_h{hidden}_l{num_layers}",
        "source": f"{spec.name}, scaled to {num_layers} layers and hidden size {hidden}",
        "hidden_size": hidden,
        "num_layers": num_layers,
    }
    data["mlp"]["intermediate_size"] = _width(spec.mlp.intermediate_size, width)
    data["attention"] |= _attention(spec, heads, width, num_layers)
    if spec.moe is not None:
        experts = _width(spec.moe.expert_intermediate_size, width)
        dense = min(spec.moe.first_dense_layers, num_layers - 1)
        data["moe"] |= {"expert_intermediate_size": experts, "first_dense_layers": dense}
    return validate(ModelSpec, Document(data=data, lines={}, file=""))


def _heads(spec: ModelSpec, factor: float) -> int:
    own = spec.attention.num_heads
    step = math.gcd(own, _HEAD_STEP)
    attention = spec.attention
    if isinstance(attention, GqaAttention) and attention.num_kv_heads < own:
        step = attention.num_kv_heads
    return max(step, step * round(own * factor / step))


def _width(value: int, factor: float) -> int:
    """Returns value * factor as a multiple of what the value is a multiple of."""
    step = next((s for s in _WIDTH_STEPS if value % s == 0), 1)
    return max(step, step * round(value * factor / step))


def _attention(spec: ModelSpec, heads: int, width: float, num_layers: int) -> dict[str, Any]:
    attention = spec.attention
    out: dict[str, Any] = {"num_heads": heads}
    if isinstance(attention, MlaAttention):
        if attention.q_lora_rank is not None:
            out["q_lora_rank"] = _width(attention.q_lora_rank, width)
        return out
    if attention.num_kv_heads == attention.num_heads:
        out["num_kv_heads"] = heads
    if attention.first_window_layer:
        share = attention.first_window_layer / spec.num_layers
        out["first_window_layer"] = round(share * num_layers)
    return out


def counted_params(spec: ModelSpec) -> int:
    """Returns the weights that a loss law counts: all that touch a token, embeddings included."""
    return num_active_params(spec, input_embedding=True)


def nearest_scaled(spec: ModelSpec, params: float) -> ModelSpec:
    """Returns the family's model whose weights that touch a token are nearest to `params`.

    Nearest by the logarithm, by bisection over the number of layers (they grow with it).
    """
    low, high = 1, 2
    while high < MAX_SCALED_LAYERS and counted_params(scaled(spec, high)) < params:
        low, high = high, min(2 * high, MAX_SCALED_LAYERS)
    while high - low > 1:
        middle = (low + high) // 2
        below = counted_params(scaled(spec, middle)) < params
        low, high = (middle, high) if below else (low, middle)
    pair = (scaled(spec, low), scaled(spec, high))
    return min(pair, key=lambda m: abs(math.log(counted_params(m) / params)))
