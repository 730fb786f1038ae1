"""The kinds of layers a model has: layers of one kind cost the same and are priced once."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.model import KdaAttention, ModelSpec
from flopwright.spec.parameters import EMBEDDING_LAYER

EMBEDDING: Final = "embedding"
DENSE: Final = "dense"
MOE: Final = "moe"
HEAD: Final = "head"
_PREDICTION: Final = "_mtp"  # a multi-token-prediction module, the head once more inside
_WINDOWED: Final = "_window"  # the same layer, attending within a sliding window
_LINEAR: Final = "_linear"  # the same with linear attention
_MIXED: Final = "_mixed_"  # reading mixtures of so many sources (attention, feed-forward)


def representatives(spec: ModelSpec) -> dict[str, int]:
    """Returns one layer of every kind the model has: its index by kind."""
    return dict(_representatives(spec))


@lru_cache(maxsize=256)
def _representatives(spec: ModelSpec) -> tuple[tuple[str, int], ...]:
    out = {EMBEDDING: EMBEDDING_LAYER}
    for layer in range(spec.num_layers):
        out.setdefault(kind_of(spec, layer), layer)
    for layer in prediction_layers(spec):
        out.setdefault(kind_of(spec, layer), layer)
    out[HEAD] = spec.num_layers
    return tuple(out.items())


def prediction_layers(spec: ModelSpec) -> range:
    """Returns the layer numbers of the multi-token-prediction modules, behind the head's."""
    return range(spec.num_layers + 1, spec.num_layers + 1 + spec.mtp_layers)


def kind_of(spec: ModelSpec, layer: int) -> str:
    """Returns the kind of layer `layer` (-1: embedding, num_layers: final norm, head, loss)."""
    if layer == EMBEDDING_LAYER:
        return EMBEDDING
    if layer == spec.num_layers:
        return HEAD
    kind = MOE if spec.is_moe_layer(layer) else DENSE
    offset = layer - spec.num_layers
    if offset > 0:  # a later module keeps more, and has fewer places to predict
        return kind + _PREDICTION + ("" if offset == 1 else str(offset))
    if isinstance(spec.attention_of(layer), KdaAttention):
        kind += _LINEAR
    elif spec.sliding_window(layer) is not None:
        kind += _WINDOWED
    if spec.attn_res_block is not None:
        first, second = spec.residual_sources(layer)
        kind += f"{_MIXED}{first}_{second}"
    return kind


def is_transformer_layer(kind: str) -> bool:
    """Returns whether it is neither the embedding nor the head."""
    return kind not in {EMBEDDING, HEAD}


def chunk_kinds(
    spec: ModelSpec, pp: int, vpp: int, layout: tuple[int, ...] | None
) -> NDArray[np.int64]:
    """Returns how many layers of each kind each chunk holds, shape (kinds, pp * vpp).

    Kinds in the order of `representatives`; the embedding stands on the first chunk, the
    head and what predicts further tokens on the last.
    """
    kinds = list(representatives(spec))
    plan = ParallelPlan(
        pp=pp,
        vpp=vpp,
        layers_per_stage=layout,
        schedule="interleaved_1f1b" if vpp > 1 else "1f1b",
    )
    held = [len(layers) for layers in plan.chunk_layers(spec.num_layers)]
    out = np.zeros((len(kinds), pp * vpp), np.int64)
    for kind, chunk in zip(_kind_indices(spec), np.repeat(np.arange(pp * vpp), held), strict=True):
        out[kind, chunk] += 1
    for layer in prediction_layers(spec):
        out[kinds.index(kind_of(spec, layer)), pp * vpp - 1] += 1
    out[kinds.index(EMBEDDING), 0] += 1
    out[kinds.index(HEAD), pp * vpp - 1] += 1
    return out


@lru_cache(maxsize=256)
def _kind_indices(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the place of each layer's kind among `representatives`."""
    kinds = list(representatives(spec))
    return tuple(kinds.index(kind_of(spec, layer)) for layer in range(spec.num_layers))
