"""A draft head of EAGLE-3's kind on features of three depths (arXiv 2607.24653, 4.1.4).

It is a multi-token-prediction module that reads, in place of the model's last state h, a
projection of three depths' states side by side, W [low, middle, h] without bias, which begins
as [0 0 I]: at first it drafts what the module predicts. The model itself is frozen, its
embedding table and output head are used as they are.

Training unrolls it: step 1 reads features, every later one what the step before it returned,
as decoding does (arXiv 2503.01840). Attention of a later step sees the features' keys up to its
place and its own chain (kernels/attention/chained.py). The loss of a step is the LK loss, minus
the logarithm of the share of drafts that verification would accept (arXiv 2602.23881).

B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flopwright.kernels.attention.chained import chained_attention
from flopwright.kernels.attention.op import attention
from flopwright.kernels.lk_loss.op import linear_lk_loss
from flopwright.models.attention_gqa.module import GroupedQueryAttention
from flopwright.models.attention_mla.module import LatentAttention
from flopwright.models.draft.cost import head_spec
from flopwright.models.draft.depths import DEPTHS, STEPS, draft_depths
from flopwright.models.mtp.module import PredictionLayer
from flopwright.models.norm.module import added_and_normed
from flopwright.models.projection.module import Projection
from flopwright.models.saving import region
from flopwright.models.transformer.module import Stage, build_stage, init_weights_
from flopwright.spec.model import ModelSpec


@dataclass(slots=True)
class _Chain:
    """Keys and values by step: the first step's are the context, the others each place's own."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Returns attention [B, S, H, V] of one more step, and keeps its keys and values."""
        self.keys.append(k)
        self.values.append(v)
        if len(self.keys) == 1:
            first: Tensor = attention(q, k, v, scale, 0)[0]
            return first
        links = torch.stack(self.keys[1:]), torch.stack(self.values[1:])
        out: Tensor = chained_attention(q, self.keys[0], self.values[0], *links, scale)[0]
        return out


def draft_layer(spec: ModelSpec, seed: int, like: Tensor) -> PredictionLayer:
    """Returns a prediction module for a model that has none, of the last layer's kind.

    It attends to everything before it and knows no residuals over depth.

    Args:
        like: its dtype and device are the module's.
    """
    plain, number = head_spec(spec), spec.num_layers + 1
    stage = build_stage(plain, [number], dtype=like.dtype, device=like.device)
    init_weights_(stage, plain, seed)
    (layer,) = stage.predictors()
    return layer


class DraftHead(nn.Module):
    """Drafts for a frozen model that is held whole by one stage.

    Attributes:
        depths: layers behind which states are read, the last of them the model's last; that one
            is read behind the last norm, as prediction modules read it.
    """

    def __init__(
        self, stage: Stage, layer: PredictionLayer, depths: tuple[int, int, int] | None = None
    ) -> None:
        """Makes a head of a prediction module, whose weights it takes.

        Args:
            stage: the model, which is not part of this module's parameters.
            layer: trained along with the projection.
        """
        super().__init__()
        spec = stage.spec
        self.depths = depths or draft_depths(spec.num_layers, spec.attn_res_block)
        assert self.depths[-1] == spec.num_layers - 1, "the last depth is the model's last state"
        attn = layer.self_attn
        near = isinstance(attn, GroupedQueryAttention) and (attn.window or attn.sinks is not None)
        assert not near, "drafts see all of their context, without sinks"
        self._stage = [stage]  # not a submodule: it is frozen and saved by itself
        self.layer = layer
        like = layer.eh_proj.weight
        self.features = Projection(
            DEPTHS * spec.hidden_size, spec.hidden_size, dtype=like.dtype, device=like.device
        )
        with torch.no_grad():
            self.features.weight.zero_()
            self.features.weight[:, -spec.hidden_size :].fill_diagonal_(1.0)

    @property
    def stage(self) -> Stage:
        """The frozen model."""
        return self._stage[0]

    @torch.no_grad()
    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (states of the depths [B, S, 3 hidden], what the head reads [B, S, hidden]).

        Args:
            tokens: [B, S] int64.
        """
        stage, was = self.stage, self.stage.training
        stage.eval()
        states, last = stage.features(tokens, self.depths[:-1])
        stage.train(was)
        return torch.cat((*states, last), -1), last

    def drafts(self, tokens: Tensor, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields by step (draft states [B, S - j, hidden], the model's at the same places).

        Step j (from 1) at place i follows the tokens up to i + j; both sides predict the one
        after that.

        Args:
            tokens: [B, S] int64, S > steps.
        """
        depths, goal = self.read(tokens)
        states, chain = self.features(depths), _Chain()
        for step in range(1, steps + 1):
            # What wraps around meets places that no step counts.
            states = self._step(states, tokens.roll(-step, 1), chain, step)
            yield states[:, :-step].clone(), goal[:, step:].clone()

    def losses(self, tokens: Tensor, steps: int = STEPS) -> tuple[Tensor, Tensor]:
        """Returns (mean LK loss in nats over the steps, shares of drafts accepted [steps])."""
        head, losses, shares = self.stage.lm_head, [], []
        assert head is not None
        weight = head.weight.detach()
        for draft, goal in self.drafts(tokens, steps):
            mean, kept = linear_lk_loss(draft.flatten(0, 1), weight, goal.flatten(0, 1), weight)
            losses.append(mean)
            shares.append(kept[4].exp().mean())
        return torch.stack(losses).mean(), torch.stack(shares).detach()

    def _step(self, x: Tensor, tokens: Tensor, chain: _Chain, step: int) -> Tensor:
        """Returns one more step's states, normalised; `PredictionLayer.predict` with a chain."""
        layer, embedding = self.layer, self.stage.model.embed_tokens
        assert embedding is not None
        with torch.no_grad():
            embedded = embedding(tokens)
        x = layer.eh_proj(layer.joined(embedded, x))
        attended = self._attended(region("norm", layer.input_layernorm, x), chain, step)
        x, normed = added_and_normed(x, attended, layer.post_attention_layernorm)
        out: Tensor = layer.shared_head.norm(x + layer.mlp(normed))
        return out

    def _attended(self, x: Tensor, chain: _Chain, step: int) -> Tensor:
        """Returns attention [B, S, hidden] of a step; its places are `step - 1` further on."""
        attn = self.layer.self_attn
        assert isinstance(attn, (LatentAttention, GroupedQueryAttention))
        q, k, v = attn.queries_keys_values(x, step - 1)
        return attn.projected(chain.attend(q, k, v, attn.scale), x)


def accepted(draft: Tensor, goal: Tensor) -> Tensor:
    """Returns the share of drafts that verification accepts, by row: 1 - TV distance.

    Args:
        draft, goal: logits [N, vocabulary].
    """
    return torch.minimum(draft.softmax(-1), goal.softmax(-1)).sum(-1)


def tokens_a_verification(shares: Tensor) -> Tensor:
    """Returns the tokens that one pass of the model yields: 1 + a1 + a1 a2 + ... .

    Args:
        shares: [steps] of drafts accepted, by step; with equal ones this is
            (1 - a^(steps + 1)) / (1 - a).
    """
    return 1 + shares.cumprod(0).sum()
