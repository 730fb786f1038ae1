"""A stage of a transformer: any run of its layers, from the embeddings (-1) to the head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flopwright.models.attention_dsa.module import LightningIndexer, SparseLatentAttention
from flopwright.models.attention_gqa.module import GroupedQueryAttention
from flopwright.models.attention_kda.module import DeltaAttention
from flopwright.models.attention_mla.module import LatentAttention
from flopwright.models.attn_res.module import mixed_and_normed
from flopwright.models.cache import KvCache, make_cache
from flopwright.models.documents import Documents, Start
from flopwright.models.embedding.module import Embedding
from flopwright.models.head.module import loss as loss
from flopwright.models.mlp.module import FeedForward
from flopwright.models.moe.dispatch import Dispatcher
from flopwright.models.moe.module import MixtureOfExperts
from flopwright.models.mtp.module import PredictionLayer
from flopwright.models.norm.module import NORMS, RmsNorm
from flopwright.models.parallel import (
    ContextParallel,
    TensorParallel,
    WholeMatrices,
    WholeSequences,
)
from flopwright.models.projection.module import Head, Projection
from flopwright.models.rotary import RotaryTable
from flopwright.models.saving import layer_region, region
from flopwright.models.transformer.init import init_weights_ as init_weights_
from flopwright.models.transformer.layers import Layer as Layer
from flopwright.models.transformer.layers import MixedLayer
from flopwright.plan.sharding import Axis, Cut, tensor_cuts
from flopwright.spec.model import KdaAttention, MlaAttention, ModelSpec
from flopwright.spec.parameters import EMBEDDING_LAYER, layer_parameters


class Body(nn.Module):
    """Everything under the name prefix `model.`: embeddings, layers by number, final norm."""

    embed_tokens: Embedding | None
    embed_positions: Embedding | None
    output_attn_res_norm: RmsNorm | None
    output_attn_res_proj: Projection | None
    norm: nn.Module | None

    def __init__(self, layers: dict[str, Layer]) -> None:
        super().__init__()
        # Named here, so that parameters come in the model's order.
        self.register_module("embed_tokens", None)
        self.register_module("embed_positions", None)
        self.layers = nn.ModuleDict(layers)
        self.register_module("output_attn_res_norm", None)
        self.register_module("output_attn_res_proj", None)
        self.register_module("norm", None)


class Stage(nn.Module):
    """The given layers of a model; its parameter names are those of the whole model.

    B batch, S the tokens of a sequence that this rank reads (all but where ranks cut sequences
    between them), S' those that it holds between layers (models/parallel.py).

    Attributes:
        layer_numbers: layers held, ascending; -1 the embeddings, num_layers the head.
        has_embedding, has_head: whether they are among them.
        tensor, context: the ranks that share its matrices and its sequences.
        places: (ranks, this rank's index) of the groups that cut tensors (plan/sharding.py).
        loss_apart: given targets beside prediction modules, make logits and then the loss.
        prediction_losses: of the last forward pass, by module, mean nats a token.
    """

    lm_head: Head | None

    def __init__(
        self,
        spec: ModelSpec,
        layer_numbers: tuple[int, ...],
        body: Body,
        rotary: RotaryTable | None,
        tensor: TensorParallel,
        context: ContextParallel,
        places: dict[Axis, tuple[int, int]],
    ) -> None:
        super().__init__()
        self.rotary = rotary
        self.tensor, self.context, self.places = tensor, context, places
        self.spec, self.layer_numbers = spec, layer_numbers
        self.has_embedding = EMBEDDING_LAYER in layer_numbers
        self.has_head = spec.num_layers in layer_numbers
        self.model = body
        self.lm_head = None
        self.loss_apart = False
        self.prediction_losses: tuple[Tensor, ...] = ()

    def blocks(self) -> tuple[Layer, ...]:
        """Returns the transformer layers held, in order, prediction modules behind them."""
        return tuple(m for m in self.model.layers.values() if isinstance(m, Layer))

    def _inner(self) -> list[tuple[int, Layer]]:
        """Returns the layers held by number, prediction modules left out."""
        layers = ((int(n), m) for n, m in self.model.layers.items() if isinstance(m, Layer))
        return [(n, m) for n, m in layers if n < self.spec.num_layers]

    def predictors(self) -> tuple[PredictionLayer, ...]:
        """Returns the multi-token-prediction modules held."""
        return tuple(m for m in self.model.layers.values() if isinstance(m, PredictionLayer))

    def moe_blocks(self) -> dict[int, MixtureOfExperts]:
        """Returns the mixture-of-experts blocks held, by layer number."""
        return {
            int(number): layer.mlp
            for number, layer in self.model.layers.items()
            if isinstance(layer, Layer) and isinstance(layer.mlp, MixtureOfExperts)
        }

    def indexers(self) -> tuple[LightningIndexer, ...]:
        """Returns the indexers of the layers held."""
        return tuple(m for m in self.modules() if isinstance(m, LightningIndexer))

    def constants(self) -> list[Tensor]:
        """Returns the derived tables that ops save but that are no activations (angles)."""
        return [] if self.rotary is None else self.rotary.tables()

    def tp_whole_names(self) -> frozenset[str]:
        """Returns the trainable tensors that stand whole on every tensor-parallel rank.

        Routed experts are not among them: expert groups say where they stand.
        """
        layers = self.layer_numbers
        whole = {
            p.name
            for layer in layers
            for p in layer_parameters(self.spec, layer)
            if p.role != "expert" and not tensor_cuts(p)
        }
        return frozenset(n for n, p in self.named_parameters() if p.requires_grad and n in whole)

    def tp_partial_names(self) -> frozenset[str]:
        """Returns those of which each of these ranks sees other tokens.

        Their gradient is the sum of the ranks'.
        """
        return self.tp_whole_names() if self.tensor.sequence_parallel else frozenset()

    def embed(self, tokens: Tensor, start: Start = 0) -> Tensor:
        """Returns the hidden states [B, S', hidden] of tokens [B, S].

        The first token stands at position `start`, or each at its own in its document.
        """
        assert self.model.embed_tokens is not None
        x: Tensor = self.model.embed_tokens(tokens)
        if self.model.embed_positions is None:
            return x
        table = self.model.embed_positions.weight
        if isinstance(start, Documents):
            places = self.tensor.own_tokens(start.positions.view(tokens.shape))
            return x + table.index_select(0, places.flatten()).view(x.shape)
        if self.tensor.size == self.context.size == 1:
            return x + table[start : start + tokens.shape[1]]
        positions = self.context.positions(tokens.shape[1], tokens.device)
        own = self.tensor.own_tokens(positions.unsqueeze(0)).squeeze(0)
        return x + table.index_select(0, own)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean nats a token of this rank's sequences; see `loss` of models/head.

        Args:
            logits: as `forward` returns them; targets: [B, S] int64.
        """
        return self.tensor.loss(logits, targets, self.spec.vocab_size)

    def head(self, x: Tensor, targets: Tensor | None = None, *finished: Tensor) -> Tensor:
        """Returns the logits [B, S, this rank's part of the vocabulary] of hidden states.

        With targets [B, S] it returns the mean nats a token, and no logits ever stand whole.
        Of attention residuals x is the running sum, and behind it come the finished ones.
        """
        assert self.lm_head is not None
        normed = self._normed(x, *finished)
        out: Tensor = self.lm_head(normed) if targets is None else self.lm_head(normed, targets)
        return out

    def _normed(self, x: Tensor, *finished: Tensor) -> Tensor:
        """Returns the last norm of hidden states, or of the last mixture of sums."""
        model = self.model
        assert model.norm is not None
        if model.output_attn_res_proj is None or model.output_attn_res_norm is None:
            plain: Tensor = region("norm", model.norm, x)
            return plain
        query, norm = model.output_attn_res_proj, model.output_attn_res_norm
        return mixed_and_normed((*finished, x), query, norm, model.norm)

    @torch.no_grad()
    def features(self, tokens: Tensor, layers: Iterable[int]) -> tuple[list[Tensor], Tensor]:
        """Returns (states behind these layers, what the head reads), each [B, S, hidden].

        Of a stage that holds the whole model. With attention residuals a state is the running
        sum. Nothing has a gradient.

        Args:
            tokens: [B, S] int64; layers: layer numbers, in whose order the states come.
        """
        x, found, finished = self.embed(tokens), dict[int, Tensor](), list[Tensor]()
        for number, block in self._inner():
            out = block(x, None, 0, *finished)
            if self.spec.begins_block(number):
                finished.append(x)
            x = found[number] = out
        return [found[n] for n in layers], self._normed(x, *finished)

    def _loss_with_predictions(self, x: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean nats a token; its backward has the modules' losses in it as well.

        Their mean counts `mtp_loss_weight` times (arXiv 2412.19437, equation 25).
        """
        embedding, head, apart = self.model.embed_tokens, self.lm_head, self.loss_apart
        assert embedding is not None
        assert head is not None
        states = self._normed(x)
        own = self.loss(head(states), targets) if apart else head(states, targets)
        losses, tokens, first = [], targets, len(self._inner())
        for place, layer in enumerate(self.predictors()):
            states, loss_of = layer_region(
                first + place, layer, states, tokens, targets, embedding, head, apart
            )
            losses.append(loss_of)
            # What wraps around meets positions that no loss counts.
            tokens = targets.roll(-layer.offset, 1)
        self.prediction_losses = tuple(one.detach() for one in losses)
        pull = torch.stack(losses).mean() * self.spec.mtp_loss_weight
        total: Tensor = own + (pull - pull.detach())
        return total

    def _sums(
        self, x: Tensor, cache: KvCache | None, start: Start, sums: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Returns the sums of attention residuals behind the layers, the running one last."""
        first = self.layer_numbers[0]
        count = 1 if self.has_embedding else self.spec.residual_sources(first)[0]
        *came, x = x.chunk(count - len(sums))
        finished = [*sums, *came]
        for place, (number, block) in enumerate(self.model.layers.items()):
            held = None if cache is None else cache.layers[int(number)]
            out = layer_region(place, block, x, held, start, *finished)
            if self.spec.begins_block(int(number)):
                finished.append(x)
            x = out
        return (*finished, x)

    def make_cache(self, batch: int, capacity: int) -> KvCache:
        """Returns an empty cache of this stage's layers, in its dtype and on its device."""
        like = next(p for p in self.parameters() if p.is_floating_point())
        return make_cache(
            self.spec, self.layer_numbers, batch, capacity, dtype=like.dtype, device=like.device
        )

    def forward(
        self,
        x: Tensor,
        cache: KvCache | None = None,
        targets: Tensor | None = None,
        sums: tuple[Tensor, ...] | None = None,
        known: int = 0,
        documents: Documents | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Returns logits where the stage holds the head, otherwise hidden states.

        With attention residuals hidden states between stages are the finished sums and the
        running one, one behind the other: [sources * B, S', hidden]. Where this rank keeps sums
        between its chunks (`sums`) only new ones come and leave, and all that are finished are
        returned behind what leaves.

        Args:
            x: tokens [B, S] int64 where it holds the embeddings, otherwise hidden states
                [B, S', hidden].
            cache: of the positions before; x stands after them and is added. No gradients.
            targets: [B, S] int64, for the loss in place of the logits (`head`). Where the stage
                holds prediction modules, theirs pull in the backward pass.
            sums: the first finished ones, each [B, S', hidden]; those that come with x follow.
            known: how many of the first ones the next stage has.
            documents: of the rows, which attention then does not leave.
        """
        start: Start = 0 if cache is None else cache.advance(x.shape[1])
        if documents is not None:
            start = documents
        if self.has_embedding:
            x = self.embed(x, start)
        if self.spec.attn_res_block is None:
            for place, (number, block) in enumerate(self._inner()):
                held = None if cache is None else cache.layers[number]
                x = layer_region(place, block, x, held, start)
            if self.has_head and targets is not None and self.predictors():
                return self._loss_with_predictions(x, targets)
            return self.head(x, targets) if self.has_head else x
        *finished, x = self._sums(x, cache, start, sums or ())
        if self.has_head:
            return self.head(x, targets, *finished)
        if sums is None:
            return torch.cat((*finished, x))
        leaving = (*finished[known:], x)
        return (torch.cat(leaving) if len(leaving) > 1 else x, *finished)


def _rotary(spec: ModelSpec, context: ContextParallel) -> RotaryTable | None:
    attn = spec.attention
    if isinstance(attn, MlaAttention):
        return RotaryTable(attn.rope, attn.qk_rope_head_dim, context)
    if attn.rope is None:
        return None
    return RotaryTable(attn.rope, attn.rope.width(attn.head_dim), context)


@dataclass(frozen=True)
class _Builder:
    """What all parts of a stage have in common."""

    spec: ModelSpec
    dispatcher: Dispatcher | None
    places: dict[Axis, tuple[int, int]]
    tensor: TensorParallel
    context: ContextParallel
    dtype: torch.dtype
    device: torch.device

    @property
    def place(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "device": self.device}

    @property
    def shared(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "context": self.context, **self.place}

    def norm(self) -> nn.Module:
        spec = self.spec
        return NORMS[spec.norm](spec.hidden_size, spec.norm_eps, **self.place)

    def embedding(self) -> Embedding:
        rows, hidden = self.spec.vocab_size, self.spec.hidden_size
        return Embedding(rows, hidden, self._own_vocabulary(), self.tensor, **self.place)

    def position_table(self) -> Embedding:
        rows, hidden = self.spec.max_seq_len, self.spec.hidden_size
        return Embedding(rows, hidden, rows, WholeMatrices(), **self.place)

    def _own_vocabulary(self) -> int:
        """Returns the rows of embedding and head that this rank holds."""
        size, index = self.places["tp"]
        ((start, stop),) = Cut(dim=0, axis="tp").ranges(self.spec.vocab_size, size, index)
        return stop - start

    def attention(self, layer: int, rotary: RotaryTable | None) -> nn.Module:
        attn, hidden, eps = (
            self.spec.attention_of(layer),
            self.spec.hidden_size,
            self.spec.norm_eps,
        )
        if isinstance(attn, KdaAttention):
            return DeltaAttention(attn, hidden, eps, **self.shared)
        if isinstance(attn, MlaAttention):
            assert rotary is not None
            kind = LatentAttention if attn.indexer is None else SparseLatentAttention
            return kind(attn, hidden, eps, rotary, **self.shared)
        window = self.spec.sliding_window(layer)
        return GroupedQueryAttention(attn, hidden, eps, rotary, window=window, **self.shared)

    def feed_forward(self, layer: int) -> nn.Module:
        spec = self.spec
        if spec.is_moe_layer(layer):
            size, index = self.places["ep"]
            return MixtureOfExperts(
                spec,
                self.dispatcher,
                index,
                size,
                etp_size=self.places["etp"][0],
                **self.shared,
            )
        mlp = spec.mlp
        return FeedForward(
            mlp,
            spec.hidden_size,
            mlp.intermediate_size,
            bias=mlp.bias,
            tensor=self.tensor,
            **self.place,
        )

    def layer(self, number: int, rotary: RotaryTable | None) -> Layer:
        norms = (self.norm(), self.norm())
        parts = self.attention(number, rotary), self.feed_forward(number)
        offset = number - self.spec.num_layers
        if offset > 0:
            hidden = self.spec.hidden_size
            inputs = self.norm(), self.norm(), Projection(2 * hidden, hidden, **self.place)
            return PredictionLayer(*parts, norms, inputs, self.norm(), offset)
        if self.spec.attn_res_block is None:
            return Layer(*parts, norms)
        sites = (self.site(), self.site())
        return MixedLayer(*parts, norms, sites, self.spec.begins_block(number))

    def site(self) -> tuple[RmsNorm, Projection]:
        """Returns the norm and the query of one mixture over depth."""
        hidden = self.spec.hidden_size
        norm = RmsNorm(hidden, self.spec.norm_eps, **self.place)
        return norm, Projection(hidden, 1, **self.place)

    def head(self) -> Head:
        spec, rows = self.spec, self._own_vocabulary()
        return Head(spec.hidden_size, rows, spec.vocab_size, self.tensor, **self.place)


def build_stage(
    spec: ModelSpec,
    layers: Iterable[int],
    *,
    dispatcher: Dispatcher | None = None,
    ep_rank: int = 0,
    ep_size: int = 1,
    etp_rank: int = 0,
    etp_size: int = 1,
    tensor: TensorParallel | None = None,
    context: ContextParallel | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Stage:
    """Returns a stage with the given layers, its weights unset (see `init_weights_`).

    Args:
        layers: layer numbers, -1 for the embeddings, spec.num_layers for norm and head, above
            that the multi-token-prediction modules.
        dispatcher: how rows reach their experts; all experts local by default.
        ep_rank, ep_size: which slice of the experts to hold: num_experts / ep_size, from
            ep_rank * num_experts / ep_size on.
        etp_rank, etp_size: which part of each expert's inner width to hold.
        tensor: the ranks that share the other matrices; this one holds all by default.
        context: the ranks that share the sequences; this one reads all by default.
    """
    tensor, context = tensor or WholeMatrices(), context or WholeSequences()
    places: dict[Axis, tuple[int, int]] = {
        "tp": (tensor.size, tensor.index),
        "ep": (ep_size, ep_rank),
        "etp": (etp_size, etp_rank),
    }
    place = torch.device(device)
    make = _Builder(spec, dispatcher, places, tensor, context, dtype, place)
    numbers, rotary = tuple(sorted(layers)), _rotary(spec, context)
    inner = [n for n in numbers if n >= 0 and n != spec.num_layers]
    body = Body({str(n): make.layer(n, rotary) for n in inner})
    stage = Stage(spec, numbers, body, rotary, tensor, context, places)
    if stage.has_embedding:
        body.embed_tokens = make.embedding()
        if spec.positions == "learned":
            body.embed_positions = make.position_table()
    if stage.has_head:
        if spec.attn_res_block is not None:
            body.output_attn_res_norm, body.output_attn_res_proj = make.site()
        body.norm, stage.lm_head = make.norm(), make.head()
        if spec.tied_embeddings and body.embed_tokens is not None:
            stage.lm_head.weight = body.embed_tokens.weight
    return stage
