"""Multi-head latent attention (arXiv 2405.04434, 2.1): low-rank queries, keys and values.

B batch, S sequence, H heads. Queries and keys have a part without position ("nope") and a
rotary part; the rotary key is one for all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flopwright.kernels.attention.cached import cached_attention
from flopwright.kernels.output_gate.op import sigmoid_gate
from flopwright.kernels.rope.frequencies import softmax_scale
from flopwright.kernels.rope.op import mla_key_value, rope
from flopwright.models.cache import LayerCache
from flopwright.models.documents import Documents, Start
from flopwright.models.norm.module import RmsNorm
from flopwright.models.parallel import (
    ContextParallel,
    TensorParallel,
    WholeMatrices,
    WholeSequences,
)
from flopwright.models.projection.module import ColumnProjection, Projection, RowProjection
from flopwright.models.rotary import RotaryTable
from flopwright.models.saving import region
from flopwright.spec.model import MlaAttention


class LatentAttention(nn.Module):
    """Causal MLA: [B, S, hidden] to [B, S, hidden].

    Attributes:
        absorb: attend in the latent where a cache holds earlier positions.
    """

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
        super().__init__()
        self.spec, self._rotary, self.absorb = spec, rotary, True
        self.tensor, self.context = tensor or WholeMatrices(), context or WholeSequences()
        self.heads = spec.num_heads // self.tensor.size
        scaling = None if spec.rope is None else spec.rope.scaling
        self.scale = softmax_scale(spec.qk_head_dim, scaling)
        eps = spec.latent_norm_eps or eps
        q_out, rank = self.heads * spec.qk_head_dim, spec.kv_lora_rank
        kv_out = self.heads * (spec.qk_nope_head_dim + spec.v_head_dim)

        def projection(width_in: int, width_out: int) -> Projection:
            return Projection(width_in, width_out, dtype=dtype, device=device)

        if spec.q_lora_rank is None:
            self.q_proj = ColumnProjection(
                hidden, q_out, self.tensor, "q_up", dtype=dtype, device=device
            )
        else:
            self.q_a_proj = projection(hidden, spec.q_lora_rank)
            self.q_a_layernorm = RmsNorm(spec.q_lora_rank, eps, dtype=dtype, device=device)
            self.q_b_proj = projection(spec.q_lora_rank, q_out)
        self.kv_a_proj_with_mqa = projection(hidden, rank + spec.qk_rope_head_dim)
        self.kv_a_layernorm = RmsNorm(rank, eps, dtype=dtype, device=device)
        self.kv_b_proj = projection(rank, kv_out)
        if spec.output_gate:
            self.g_proj = ColumnProjection(
                hidden, self.heads * spec.v_head_dim, self.tensor, "g_proj", dtype=dtype,
                device=device,
            )  # fmt: skip
        self.o_proj = RowProjection(
            self.heads * spec.v_head_dim, hidden, self.tensor, "o_proj", dtype=dtype, device=device
        )

    def forward(self, x: Tensor, cache: LayerCache | None = None, start: Start = 0) -> Tensor:
        """Returns the attended states.

        Args:
            cache: latents and rotary keys of the positions before `start`; x's are added.
            start: position of the first state in x, or the documents that x [1, T] is.
        """
        spec = self.spec
        together = self.tensor.size if self.tensor.sequence_parallel else 1
        cos, sin = self._rotary(x.shape[1] * together, x, start)
        q = self._queries(x, cos, sin)
        latent, key = self.kv_a_proj_with_mqa(x).split(
            (spec.kv_lora_rank, spec.qk_rope_head_dim), -1
        )
        if self.tensor.size == 1:
            latent = region("norm", self.kv_a_layernorm, latent)
        else:
            latent, key = region("norm", self._normed_latent, latent, key)
        if cache is not None:
            shared = rope(key.unsqueeze(2), cos, sin, 0, True).squeeze(2)
            held = cache.extend(latent, shared)
            # Where nothing came before, keys and values of every head are made once anyway.
            if start != 0:
                attend = self._absorbed if self.absorb else self._plain
                return self._output(attend(q, *held), x)
        k, v = region("mla_up", self._keys_values, latent, key, cos, sin)
        within = start.attend if isinstance(start, Documents) else self.context.attend
        out = region("core_attn", within, q, k, v, self.scale, 0, keep=1)
        return self._output(out, x)

    def queries_keys_values(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Returns those of all heads [B, S, H, ...], for who attends by itself (models/draft).

        Args:
            start: position of the first state in x [B, S, hidden], all of them on one rank.
        """
        assert self.tensor.size == 1
        cos, sin = self._rotary(x.shape[1], x, start)
        widths = (self.spec.kv_lora_rank, self.spec.qk_rope_head_dim)
        latent, key = self.kv_a_proj_with_mqa(x).split(widths, -1)
        k, v = self._keys_values(self.kv_a_layernorm(latent), key, cos, sin)
        return self._queries(x, cos, sin), k, v

    def projected(self, out: Tensor, x: Tensor) -> Tensor:
        """Returns the block's result [B, S, hidden] for attended values [B, S, H, V] of x."""
        return self._output(out, x)

    def _queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns [B, S, H, nope + rope], the rotary part turned."""
        if self.spec.q_lora_rank is None:
            return region("mla_up", self._raised, x, self.q_proj, cos, sin)
        latent = region("norm", self._normed_query, self.q_a_proj(x))
        return region("mla_up", self._raised, latent, self.q_b_proj, cos, sin)

    def _raised(self, x: Tensor, up: Projection, cos: Tensor, sin: Tensor) -> Tensor:
        raised = up(x)
        heads = raised.view(*raised.shape[:-1], self.heads, -1)
        if self.spec.rope is None:
            plain: Tensor = heads
            return plain
        turned: Tensor = rope(heads, cos, sin, self.spec.qk_nope_head_dim, True)
        return turned

    def _normed_query(self, latent: Tensor) -> Tensor:
        return self.tensor.gather(self.q_a_layernorm(latent), "q_a_layernorm")

    def _normed_latent(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns latents, normalised, and rotary keys of all tokens, which travel together."""
        both = torch.cat((self.kv_a_layernorm(latent), key), -1)
        both = self.tensor.gather(both, "kv_a_layernorm")
        latent, key = torch.split(both, [self.spec.kv_lora_rank, self.spec.qk_rope_head_dim], -1)
        return latent.contiguous(), key

    def _keys_values(
        self, latent: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the keys [B, S, H, nope + rope] and values [B, S, H, V] of all heads."""
        kv = self.kv_b_proj(latent).view(*latent.shape[:-1], self.heads, -1)
        k, v = mla_key_value(kv, key, cos, sin, self.spec.qk_nope_head_dim)
        return k, v

    def _output(self, out: Tensor, x: Tensor) -> Tensor:
        """Returns the projection of the values [B, S, H, V], gated by the state where asked."""
        values = out.flatten(2)
        if self.spec.output_gate:
            values = sigmoid_gate(values, self.g_proj(x))
        projected: Tensor = self.o_proj(values)
        return projected

    def _plain(self, q: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        """Returns [B, S, H, V], keys and values made again for all T positions held.

        Args:
            latent: [B, T, kv_lora_rank]; key: [B, T, rope].
        """
        kv = self.kv_b_proj(latent).view(*latent.shape[:-1], self.spec.num_heads, -1)
        k, v = kv.split((self.spec.qk_nope_head_dim, self.spec.v_head_dim), -1)
        shared = key.unsqueeze(2).expand(*k.shape[:-1], -1)
        return cached_attention(q, torch.cat((k, shared), -1), v, self.scale)

    def _absorbed(self, q: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        """Returns the same without keys or values: attention runs in the latent.

        With K = W_k c and V = W_v c, q . K = (W_k^T q) . c and sum p V = W_v sum p c: one
        key head of width kv_lora_rank + rope serves all query heads (arXiv 2405.04434, 2.1.2).
        """
        spec = self.spec
        weight = self.kv_b_proj.whole().view(spec.num_heads, -1, spec.kv_lora_rank)
        w_k, w_v = torch.split(weight, [spec.qk_nope_head_dim, spec.v_head_dim], 1)
        nope, rotary = torch.split(q, [spec.qk_nope_head_dim, spec.qk_rope_head_dim], -1)
        queries = torch.cat((torch.einsum("bshn,hnr->bshr", nope, w_k), rotary), -1)
        keys = torch.cat((latent, key), -1).unsqueeze(2)
        mixed = cached_attention(queries, keys, latent.unsqueeze(2), self.scale)
        return torch.einsum("bshr,hvr->bshv", mixed, w_v)
