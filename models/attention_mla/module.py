"""Multi-head latent attention (arXiv 2405.04434, 2.1): low-rank queries, keys and values.

B batch, S sequence, H heads. Queries and keys have a part without position ("nope") and a
rotary part; the rotary key is one for all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flopwright.kernels.attention.op import attention
from flopwright.kernels.rope.frequencies import softmax_scale
from flopwright.kernels.rope.op import mla_key_value, rope
from flopwright.models.norm.module import RmsNorm
from flopwright.models.projection.module import Projection
from flopwright.models.rotary import RotaryTable
from flopwright.spec.model import MlaAttention


class LatentAttention(nn.Module):
    """Causal MLA: [B, S, hidden] to [B, S, hidden]."""

    def __init__(
        self,
        spec: MlaAttention,
        hidden: int,
        eps: float,
        rotary: RotaryTable,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self._rotary = spec, rotary
        self.scale = softmax_scale(spec.qk_head_dim, spec.rope.scaling)
        q_out, rank = spec.num_heads * spec.qk_head_dim, spec.kv_lora_rank
        kv_out = spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim)

        def projection(width_in: int, width_out: int) -> Projection:
            return Projection(width_in, width_out, dtype=dtype, device=device)

        if spec.q_lora_rank is None:
            self.q_proj = projection(hidden, q_out)
        else:
            self.q_a_proj = projection(hidden, spec.q_lora_rank)
            self.q_a_layernorm = RmsNorm(spec.q_lora_rank, eps, dtype=dtype, device=device)
            self.q_b_proj = projection(spec.q_lora_rank, q_out)
        self.kv_a_proj_with_mqa = projection(hidden, rank + spec.qk_rope_head_dim)
        self.kv_a_layernorm = RmsNorm(rank, eps, dtype=dtype, device=device)
        self.kv_b_proj = projection(rank, kv_out)
        self.o_proj = projection(spec.num_heads * spec.v_head_dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the attended states."""
        spec = self.spec
        heads = (*x.shape[:-1], spec.num_heads, -1)
        cos, sin = self._rotary(x.shape[1], x)
        if spec.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = rope(q.view(heads), cos, sin, spec.qk_nope_head_dim, True)
        latent, key = self.kv_a_proj_with_mqa(x).split(
            (spec.kv_lora_rank, spec.qk_rope_head_dim), -1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(heads)
        k, v = mla_key_value(kv, key, cos, sin, spec.qk_nope_head_dim)
        out, _ = attention(q, k, v, self.scale)
        projected: Tensor = self.o_proj(out.flatten(2))
        return projected
