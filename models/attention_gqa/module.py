"""Grouped-query attention (arXiv 2305.13245); multi-head where every query has its own key."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flopwright.kernels.attention.cached import cached_attention
from flopwright.kernels.attention.sinks import attention_with_sinks
from flopwright.kernels.rope.frequencies import softmax_scale
from flopwright.kernels.rope.op import rope
from flopwright.models.cache import LayerCache
from flopwright.models.documents import Documents, Start
from flopwright.models.norm.module import RmsNorm
from flopwright.models.parallel import (
    ContextParallel,
    TensorParallel,
    WholeMatrices,
    WholeSequences,
)
from flopwright.models.projection.module import Projection, RowProjection, columns
from flopwright.models.rotary import RotaryTable
from flopwright.models.saving import region
from flopwright.spec.model import GqaAttention


class GroupedQueryAttention(nn.Module):
    """Causal GQA: [B, S, hidden] to [B, S, hidden]; rotary pairs are (i, i + width / 2)."""

    def __init__(
        self,
        spec: GqaAttention,
        hidden: int,
        eps: float,
        rotary: RotaryTable | None,
        *,
        window: int | None = None,
        tensor: TensorParallel | None = None,
        context: ContextParallel | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self._rotary, self.window = spec, rotary, window or 0
        self.scale = softmax_scale(spec.head_dim, spec.rope.scaling if spec.rope else None)
        self.tensor, self.context = tensor or WholeMatrices(), context or WholeSequences()
        size = self.tensor.size
        assert spec.num_kv_heads % size == 0, "a rank has whole key heads (executor/launch)"
        q_out = spec.num_heads // size * spec.head_dim
        kv_out = spec.num_kv_heads // size * spec.head_dim

        def projection(width_in: int, width_out: int, bias: bool) -> Projection:
            return Projection(width_in, width_out, bias=bias, dtype=dtype, device=device)

        self.q_proj = projection(hidden, q_out, spec.bias)
        self.k_proj = projection(hidden, kv_out, spec.bias)
        self.v_proj = projection(hidden, kv_out, spec.bias)
        self.o_proj = RowProjection(
            q_out, hidden, self.tensor, "o_proj", bias=spec.o_bias, dtype=dtype, device=device
        )
        sinks = torch.empty(spec.num_heads // size, dtype=dtype, device=device)
        self.sinks = nn.Parameter(sinks) if spec.sinks else None
        assert self.sinks is None or self.context.size == 1, "refused (executor/launch)"
        if spec.qk_norm:
            whole = spec.qk_norm_whole
            assert not whole or size == 1, "refused (executor/launch)"
            widths = (q_out, kv_out) if whole else (spec.head_dim, spec.head_dim)
            self.q_norm, self.k_norm = (
                RmsNorm(width, eps, dtype=dtype, device=device) for width in widths
            )

    def forward(self, x: Tensor, cache: LayerCache | None = None, start: Start = 0) -> Tensor:
        """Returns the attended states.

        Args:
            cache: keys and values of the positions before `start`; x's are added to it.
            start: position of the first state in x, or the documents that x [1, T] is.
        """
        q, k, v = self.queries_keys_values(x, start)
        if cache is None:
            attend = self.context.attend if self.sinks is None else self._with_sinks
            if isinstance(start, Documents):
                assert self.sinks is None, "refused (executor/launch)"
                attend = start.attend
            out = region("core_attn", attend, q, k, v, self.scale, self.window, keep=1)
        else:
            k, v = cache.extend(k, v)
            out = cached_attention(q, k, v, self.scale, self.window, self.sinks)
        return self.projected(out, x)

    def queries_keys_values(self, x: Tensor, start: Start = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Returns those of this rank's heads [B, S, heads, head_dim], turned; see `forward`."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            y.view(*y.shape[:-1], -1, self.spec.head_dim)
            for y in columns(self.tensor, x, projections, "qkv")
        )
        cos, sin = (None, None) if self._rotary is None else self._rotary(q.shape[1], x, start)
        if self.spec.qk_norm:
            q = region("norm", _normed_and_turned, q, self.q_norm, cos, sin)
            k = region("norm", _normed_and_turned, k, self.k_norm, cos, sin)
        else:
            q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        return q, k, v

    def projected(self, out: Tensor, x: Tensor) -> Tensor:
        """Returns the block's result [B, S, hidden] for attended values [B, S, H, V] of x."""
        del x  # nothing gates it
        projected: Tensor = self.o_proj(out.flatten(2))
        return projected

    def _with_sinks(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        out: Tensor = attention_with_sinks(q, k, v, self.sinks, scale, window)[0]
        return out


def _turned(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None:
        return x
    width = 2 * cos.shape[-1]
    turned: Tensor = rope(x[..., :width], cos, sin, 0, False)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)


def _normed_and_turned(x: Tensor, norm: RmsNorm, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    whole = norm.weight.numel() != x.shape[-1]
    normed = norm(x.flatten(2)).view(x.shape) if whole else norm(x)
    return _turned(normed, cos, sin)
