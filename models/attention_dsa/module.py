"""Sparse attention of DeepSeek-V3.2: latent attention over what an indexer chooses.

B batch, S sequence, T positions seen, H heads, R the latent's width. Up to top_k positions
nothing is left out and the block is latent attention, bit for bit. Beyond that all heads
attend in the latent (one key a position for all of them), over the chosen positions alone.

In training the indexer learns from what attention gives the chosen positions, and from nothing
else: its inputs are cut off from the rest of the model, and its choice has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flopwright.kernels.attention.op import attention
from flopwright.kernels.linear.op import linear
from flopwright.kernels.rope.op import rope
from flopwright.kernels.sparse_attention.op import (
    head_linear,
    index_loss,
    pulled,
    select_keys,
    selected_attention,
)
from flopwright.models.attention_mla.module import LatentAttention
from flopwright.models.cache import LayerCache
from flopwright.models.documents import Documents, Start
from flopwright.models.norm.module import LayerNorm
from flopwright.models.parallel import ContextParallel, TensorParallel
from flopwright.models.projection.module import Projection
from flopwright.models.rotary import RotaryTable
from flopwright.models.saving import region
from flopwright.spec.model import Indexer, MlaAttention

# The norm of index keys has an epsilon of its own in the released code.
KEY_NORM_EPS = 1e-6


class LightningIndexer(nn.Module):
    """Queries, keys and head weights by which positions are scored.

    The first columns of queries and keys are turned, in pairs (i, i + width / 2). The released
    code also multiplies both by one orthogonal matrix before it narrows them to FP8, which
    leaves the products as they are, and is left out.

    Attributes:
        share: weight of a micro-batch's loss: 1 / micro-batches of a step.
    """

    def __init__(
        self,
        spec: Indexer,
        hidden: int,
        q_rank: int,
        rotary_width: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self.rotary_width, self.share = spec, rotary_width, 1.0
        width = spec.num_heads * spec.head_dim
        self.wq_b = Projection(q_rank, width, dtype=dtype, device=device)
        self.wk = Projection(hidden, spec.head_dim, dtype=dtype, device=device)
        self.k_norm = LayerNorm(spec.head_dim, KEY_NORM_EPS, dtype=dtype, device=device)
        self.weights_proj = Projection(hidden, spec.num_heads, dtype=dtype, device=device)

    def forward(
        self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (queries [B, S, I, W], keys [B, S, W], weights [B, S, I] at least fp32).

        Args:
            x: [B, S, hidden], the state; latent: [B, S, q_lora_rank], attention's query latent.
                Neither gets a gradient from here.
        """
        x, latent = x.detach(), latent.detach()
        q = self.wq_b(latent).unflatten(-1, (self.spec.num_heads, self.spec.head_dim))
        k = self.k_norm(self.wk(x)).unsqueeze(2)
        scale = (self.spec.num_heads * self.spec.head_dim) ** -0.5
        weights = linear(x, self.weights_proj.whole(), None, True) * scale
        return self._turned(q, cos, sin), self._turned(k, cos, sin).squeeze(2), weights

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = self.rotary_width
        turned: Tensor = rope(x[..., :width], cos, sin, 0, False)
        return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)


class SparseLatentAttention(LatentAttention):
    """Causal MLA over the positions that an indexer chooses: [B, S, hidden] to [B, S, hidden]."""

    def __init__(
        self,
        spec: MlaAttention,
        hidden: int,
        eps: float,
        rotary: RotaryTable,
        *,
        tensor: TensorParallel | None = None,
        context: ContextParallel | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(
            spec, hidden, eps, rotary, tensor=tensor, context=context, dtype=dtype, device=device
        )
        alone = self.tensor.size == self.context.size == 1
        assert alone, "an indexer looks over all heads and tokens (executor/launch)"
        assert spec.indexer is not None
        assert spec.q_lora_rank is not None
        self.indexer = LightningIndexer(
            spec.indexer, hidden, spec.q_lora_rank, spec.qk_rope_head_dim, dtype=dtype,
            device=device,
        )  # fmt: skip

    def forward(self, x: Tensor, cache: LayerCache | None = None, start: Start = 0) -> Tensor:
        """Returns the attended states; see `LatentAttention.forward`."""
        assert not isinstance(start, Documents), "refused (executor/launch)"
        spec, seq = self.spec, x.shape[1]
        cos, sin = self._rotary(seq, x, start)
        raised = region("norm", self._normed_query, self.q_a_proj(x))
        q = region("mla_up", self._raised, raised, self.q_b_proj, cos, sin)
        index = self.indexer(x, raised, cos, sin)
        latent, key = self.kv_a_proj_with_mqa(x).split(
            (spec.kv_lora_rank, spec.qk_rope_head_dim), -1
        )
        latent = region("norm", self.kv_a_layernorm, latent)
        if cache is not None:
            shared = rope(key.unsqueeze(2), cos, sin, 0, True).squeeze(2)
            return self._output(self._from_cache(cache, start, q, latent, shared, index), x)
        if seq <= self._top_k:
            k, v = region("mla_up", self._keys_values, latent, key, cos, sin)
            out = region("core_attn", self._over_all, q, k, v, *index, keep=1)
            return self._output(out, x)
        keys = torch.cat((latent, rope(key.unsqueeze(2), cos, sin, 0, True).squeeze(2)), -1)
        in_latent = region("mla_up", self._into_latent, q)
        mixed = region("core_attn", self._over_chosen, in_latent, keys, *index, keep=1)
        return self._output(self._out_of_latent(mixed), x)

    @property
    def _top_k(self) -> int:
        assert self.spec.indexer is not None
        return self.spec.indexer.top_k

    def _over_all(
        self, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, weights: Tensor
    ) -> Tensor:
        """Returns [B, S, H, V] of attention that leaves nothing out."""
        out, lse = attention(q, k, v, self.scale, 0)
        return self._taught(out, (index_q, index_k, weights), (q, k, lse), None)

    def _over_chosen(
        self, q: Tensor, keys: Tensor, index_q: Tensor, index_k: Tensor, weights: Tensor
    ) -> Tensor:
        """Returns [B, S, H, R], of queries and keys in the latent."""
        chosen = select_keys(index_q, index_k, weights, self._top_k)
        out, lse = selected_attention(q, keys, chosen, self.spec.kv_lora_rank, self.scale)
        return self._taught(out, (index_q, index_k, weights), (q, keys, lse), chosen)

    def _taught(
        self,
        out: Tensor,
        index: tuple[Tensor, Tensor, Tensor],
        attended: tuple[Tensor, Tensor, Tensor],
        chosen: Tensor | None,
    ) -> Tensor:
        """Returns `out`, in whose backward the indexer's loss pulls on its queries and keys."""
        if not (self.training and torch.is_grad_enabled()):
            return out
        assert self.spec.indexer is not None
        loss = index_loss(*index, *attended, chosen, self.scale)[0]
        return pulled(out, loss, self.spec.indexer.loss_weight * self.indexer.share)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Returns what makes keys [H, nope, R] and values [H, V, R] of a latent."""
        spec = self.spec
        weight = self.kv_b_proj.whole().view(self.heads, -1, spec.kv_lora_rank)
        of_keys, of_values = torch.split(weight, [spec.qk_nope_head_dim, spec.v_head_dim], 1)
        return of_keys, of_values

    def _into_latent(self, q: Tensor) -> Tensor:
        """Returns queries [B, S, H, R + rope] for keys in the latent: q . W c = (W^T q) . c."""
        nope, rotary = torch.split(q, [self.spec.qk_nope_head_dim, self.spec.qk_rope_head_dim], -1)
        return torch.cat((head_linear(nope, self._matrices()[0].transpose(1, 2)), rotary), -1)

    def _out_of_latent(self, mixed: Tensor) -> Tensor:
        """Returns values [B, S, H, V] of mixtures of latents."""
        values: Tensor = head_linear(mixed, self._matrices()[1])
        return values

    def _from_cache(
        self,
        cache: LayerCache,
        start: int,
        q: Tensor,
        latent: Tensor,
        shared: Tensor,
        index: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """Returns [B, S, H, V] of new positions over all that the cache then holds."""
        index_q, index_k, weights = index
        latents, keys, index_keys = cache.extend(latent, shared, index_k)
        if start + q.shape[1] <= self._top_k:
            return (self._absorbed if self.absorb else self._plain)(q, latents, keys)
        chosen = select_keys(index_q, index_keys, weights, self._top_k)
        both = torch.cat((latents, keys), -1)
        width = self.spec.kv_lora_rank
        mixed = selected_attention(self._into_latent(q), both, chosen, width, self.scale)[0]
        return self._out_of_latent(mixed)
