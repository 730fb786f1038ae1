"""A stage of a transformer: any run of its layers, from the embeddings (-1) to the head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flopwright.models.attention_gqa.module import GroupedQueryAttention
from flopwright.models.attention_mla.module import LatentAttention
from flopwright.models.cache import KvCache, LayerCache, make_cache
from flopwright.models.embedding.module import Embedding
from flopwright.models.head.module import loss as loss
from flopwright.models.mlp.module import FeedForward
from flopwright.models.moe.dispatch import Dispatcher
from flopwright.models.moe.module import MixtureOfExperts
from flopwright.models.norm.module import NORMS
from flopwright.models.projection.module import Projection
from flopwright.models.rotary import RotaryTable
from flopwright.models.saving import layer_region, region
from flopwright.models.transformer.init import init_weights_ as init_weights_
from flopwright.spec.model import MlaAttention, ModelSpec
from flopwright.spec.parameters import EMBEDDING_LAYER


class Layer(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self, attention: nn.Module, mlp: nn.Module, norms: tuple[nn.Module, nn.Module]
    ) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = norms[0], attention
        self.post_attention_layernorm, self.mlp = norms[1], mlp

    def forward(self, x: Tensor, cache: LayerCache | None = None, start: int = 0) -> Tensor:
        """Returns hidden states like x [batch, seq, hidden].

        Args:
            cache: what attention keeps of the positions before `start`; x's are added.
            start: position of the first state in x.
        """
        x = x + self.self_attn(region("norm", self.input_layernorm, x), cache, start)
        normed = region("norm", self.post_attention_layernorm, x)
        block = "moe" if isinstance(self.mlp, MixtureOfExperts) else "mlp"
        out: Tensor = x + region(block, self.mlp, normed)
        return out


class Body(nn.Module):
    """Everything under the name prefix `model.`: embeddings, layers by number, final norm."""

    embed_tokens: Embedding | None
    embed_positions: Embedding | None
    norm: nn.Module | None

    def __init__(self, layers: dict[str, Layer]) -> None:
        super().__init__()
        self.embed_tokens = self.embed_positions = self.norm = None
        self.layers = nn.ModuleDict(layers)


class Stage(nn.Module):
    """The given layers of a model; its parameter names are those of the whole model.

    Attributes:
        layer_numbers: layers held, ascending; -1 the embeddings, num_layers the head.
        has_embedding, has_head: whether they are among them.
    """

    lm_head: Projection | None

    def __init__(
        self,
        spec: ModelSpec,
        layer_numbers: tuple[int, ...],
        body: Body,
        rotary: RotaryTable | None,
    ) -> None:
        super().__init__()
        self.rotary = rotary
        self.spec, self.layer_numbers = spec, layer_numbers
        self.has_embedding = EMBEDDING_LAYER in layer_numbers
        self.has_head = spec.num_layers in layer_numbers
        self.model = body
        self.lm_head = None

    def blocks(self) -> tuple[Layer, ...]:
        """Returns the transformer layers held, in order."""
        return tuple(m for m in self.model.layers.values() if isinstance(m, Layer))

    def moe_blocks(self) -> dict[int, MixtureOfExperts]:
        """Returns the mixture-of-experts blocks held, by layer number."""
        return {
            int(number): layer.mlp
            for number, layer in self.model.layers.items()
            if isinstance(layer, Layer) and isinstance(layer.mlp, MixtureOfExperts)
        }

    def constants(self) -> list[Tensor]:
        """Returns the derived tables that ops save but that are no activations (angles)."""
        return [] if self.rotary is None else self.rotary.tables()

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Returns the hidden states [batch, seq, hidden] of tokens [batch, seq].

        The first token stands at position `start`.
        """
        assert self.model.embed_tokens is not None
        x: Tensor = self.model.embed_tokens(tokens)
        if self.model.embed_positions is not None:
            x = x + self.model.embed_positions.weight[start : start + tokens.shape[1]]
        return x

    def head(self, x: Tensor) -> Tensor:
        """Returns the logits [batch, seq, vocabulary] of hidden states."""
        assert self.model.norm is not None
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(region("norm", self.model.norm, x))
        return logits

    def make_cache(self, batch: int, capacity: int) -> KvCache:
        """Returns an empty cache of this stage's layers, in its dtype and on its device."""
        like = next(p for p in self.parameters() if p.is_floating_point())
        return make_cache(
            self.spec, self.layer_numbers, batch, capacity, dtype=like.dtype, device=like.device
        )

    def forward(self, x: Tensor, cache: KvCache | None = None) -> Tensor:
        """Returns logits where the stage holds the head, otherwise hidden states.

        Args:
            x: tokens [batch, seq] int64 where it holds the embeddings, otherwise hidden
                states [batch, seq, hidden].
            cache: of the positions before; x stands after them and is added. No gradients.
        """
        start = 0 if cache is None else cache.advance(x.shape[1])
        if self.has_embedding:
            x = self.embed(x, start)
        for place, (number, block) in enumerate(self.model.layers.items()):
            held = None if cache is None else cache.layers[int(number)]
            x = layer_region(place, block, x, held, start)
        return self.head(x) if self.has_head else x


def _rotary(spec: ModelSpec) -> RotaryTable | None:
    attn = spec.attention
    if isinstance(attn, MlaAttention):
        return RotaryTable(attn.rope, attn.qk_rope_head_dim)
    return RotaryTable(attn.rope, attn.head_dim) if attn.rope is not None else None


@dataclass(frozen=True)
class _Builder:
    """What all parts of a stage have in common."""

    spec: ModelSpec
    dispatcher: Dispatcher | None
    ep_rank: int
    ep_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def place(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "device": self.device}

    def norm(self) -> nn.Module:
        spec = self.spec
        return NORMS[spec.norm](spec.hidden_size, spec.norm_eps, **self.place)

    def embedding(self, rows: int) -> Embedding:
        return Embedding(rows, self.spec.hidden_size, **self.place)

    def attention(self, layer: int, rotary: RotaryTable | None) -> nn.Module:
        attn, hidden, eps = self.spec.attention, self.spec.hidden_size, self.spec.norm_eps
        if isinstance(attn, MlaAttention):
            assert rotary is not None
            return LatentAttention(attn, hidden, eps, rotary, **self.place)
        window = self.spec.sliding_window(layer)
        return GroupedQueryAttention(attn, hidden, eps, rotary, window=window, **self.place)

    def feed_forward(self, layer: int) -> nn.Module:
        spec = self.spec
        if spec.is_moe_layer(layer):
            return MixtureOfExperts(
                spec, self.dispatcher, self.ep_rank, self.ep_size, **self.place
            )
        mlp = spec.mlp
        return FeedForward(
            mlp.kind, spec.hidden_size, mlp.intermediate_size, bias=mlp.bias, **self.place
        )

    def layer(self, number: int, rotary: RotaryTable | None) -> Layer:
        norms = (self.norm(), self.norm())
        return Layer(self.attention(number, rotary), self.feed_forward(number), norms)

    def head(self) -> Projection:
        spec = self.spec
        return Projection(spec.hidden_size, spec.vocab_size, **self.place)


def build_stage(
    spec: ModelSpec,
    layers: Iterable[int],
    *,
    dispatcher: Dispatcher | None = None,
    ep_rank: int = 0,
    ep_size: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Stage:
    """Returns a stage with the given layers, its weights unset (see `init_weights_`).

    Args:
        layers: layer numbers, -1 for the embeddings, spec.num_layers for norm and head.
        dispatcher: how rows reach their experts; all experts local by default.
        ep_rank, ep_size: which slice of the experts to hold: num_experts / ep_size, from
            ep_rank * num_experts / ep_size on.
    """
    make = _Builder(spec, dispatcher, ep_rank, ep_size, dtype, torch.device(device))
    numbers, rotary = tuple(sorted(layers)), _rotary(spec)
    inner = [n for n in numbers if 0 <= n < spec.num_layers]
    body = Body({str(n): make.layer(n, rotary) for n in inner})
    stage = Stage(spec, numbers, body, rotary)
    if stage.has_embedding:
        body.embed_tokens = make.embedding(spec.vocab_size)
        if spec.positions == "learned":
            body.embed_positions = make.embedding(spec.max_seq_len)
    if stage.has_head:
        body.norm, stage.lm_head = make.norm(), make.head()
        if spec.tied_embeddings and body.embed_tokens is not None:
            stage.lm_head.weight = body.embed_tokens.weight
    return stage
