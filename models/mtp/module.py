"""Multi-token prediction (arXiv 2412.19437, 2.2): layers that each predict one token further.

Module k reads at every position the state of the module before it (k = 1: the model's own,
behind its last norm) and the embedding of the token k places behind, and predicts the one after
that. Embedding table and output head are the model's. Its projection reads the embedding's half
first, as the released weights have it (the paper names the state first).

B batch, S sequence. The last k positions of a sequence have no token to predict: they pass
through the layer, so that shapes stay, and are left out of the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flopwright.models.embedding.module import Embedding
from flopwright.models.head.module import loss
from flopwright.models.projection.module import Head, Projection
from flopwright.models.saving import region
from flopwright.models.transformer.layers import Layer


class _SharedHead(nn.Module):
    """The norm before the shared head, under the name that releases give it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm


class PredictionLayer(Layer):
    """Module number `offset` (1 for the first): norms, a projection, a layer, a norm."""

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        norms: tuple[nn.Module, nn.Module],
        inputs: tuple[nn.Module, nn.Module, Projection],
        last_norm: nn.Module,
        offset: int,
    ) -> None:
        nn.Module.__init__(self)
        # Named in the order of `spec.parameters`.
        self.hnorm, self.enorm, self.eh_proj = inputs
        self.input_layernorm, self.self_attn = norms[0], attention
        self.post_attention_layernorm, self.mlp = norms[1], mlp
        self.shared_head = _SharedHead(last_norm)
        self.offset = offset

    def predict(self, x: Tensor, tokens: Tensor, embedding: Embedding) -> Tensor:
        """Returns the states [B, S, hidden], normalised, that the head reads.

        Args:
            x: [B, S, hidden], normalised states of the module before.
            tokens: [B, S] int64, for each position the token `offset` places behind it.
        """
        normed: Tensor = self.shared_head.norm(self._through(x, tokens, embedding))
        return normed

    def _through(self, x: Tensor, tokens: Tensor, embedding: Embedding) -> Tensor:
        """Returns the layer's states before its last norm; see `predict`."""
        joined = region("norm", self.joined, embedding(tokens), x)
        return Layer.forward(self, self.eh_proj(joined))

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        tokens: Tensor,
        targets: Tensor,
        embedding: Embedding,
        head: Head,
        apart: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns (states as `predict` does, mean nats a token that has a target).

        Args:
            targets: [B, S] int64, the token that follows each position.
            apart: make the logits, then the loss; else both in one.
        """
        normed, own = region("norm", self._ends, self._through(x, tokens, embedding))
        wanted = targets[:, self.offset :]
        return normed, loss(head(own), wanted) if apart else head(own, wanted)

    def _ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (the norm of x, and of it what has a target): the next module's, the head's."""
        normed = self.shared_head.norm(x)
        return normed, normed[:, : -self.offset].clone()

    def joined(self, embedded: Tensor, x: Tensor) -> Tensor:
        """Returns what the projection reads [B, S, 2 hidden] of an embedding and a state."""
        return torch.cat((self.enorm(embedded), self.hnorm(x)), -1)
