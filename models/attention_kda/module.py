"""Kimi Delta Attention (arXiv 2510.26692; bounded decays and full gate: arXiv 2607.24653).

B batch, S sequence, H heads of width K. Queries, keys and values pass a short causal
convolution; a state [K, K] a head is read and written with a decay by channel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flopwright.kernels.kda.op import kda
from flopwright.kernels.kda.reference import recurrent
from flopwright.kernels.kda_gate.op import kda_gate
from flopwright.kernels.linear.reference import wide_dtype
from flopwright.kernels.output_gate.op import gated_norm
from flopwright.kernels.short_conv.op import short_conv
from flopwright.models.cache import StateCache
from flopwright.models.documents import Documents, Start
from flopwright.models.norm.module import RmsNorm
from flopwright.models.parallel import (
    ContextParallel,
    TensorParallel,
    WholeMatrices,
    WholeSequences,
)
from flopwright.models.projection.module import Projection, RowProjection, columns
from flopwright.models.saving import region
from flopwright.spec.model import KdaAttention


class ShortConvolution(nn.Module):
    """The taps of each channel, [channels, 1, kernel]."""

    def __init__(
        self, channels: int, kernel: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel, dtype=dtype, device=device))


class DeltaAttention(nn.Module):
    """Causal KDA: [B, S, hidden] to [B, S, hidden]. Tensor-parallel ranks hold whole heads."""

    def __init__(
        self,
        spec: KdaAttention,
        hidden: int,
        eps: float,
        *,
        tensor: TensorParallel | None = None,
        context: ContextParallel | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self.scale = spec, 1.0 / math.sqrt(spec.head_dim)
        self.tensor, self.context = tensor or WholeMatrices(), context or WholeSequences()
        heads = spec.num_heads // self.tensor.size
        inner = heads * spec.head_dim

        def projection(width_in: int, width_out: int) -> Projection:
            return Projection(width_in, width_out, dtype=dtype, device=device)

        def channels(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))

        self.q_proj, self.k_proj, self.v_proj = (projection(hidden, inner) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConvolution(inner, spec.conv_kernel, dtype=dtype, device=device) for _ in range(3)
        )
        self.A_log, self.dt_bias = channels(heads), channels(inner)
        self.f_a_proj = projection(hidden, spec.decay_rank)
        self.f_b_proj = projection(spec.decay_rank, inner)
        self.b_proj = projection(hidden, heads)
        if spec.output_gate_rank is None:
            self.g_proj = projection(hidden, inner)
        else:
            self.g_a_proj = projection(hidden, spec.output_gate_rank)
            self.g_b_proj = projection(spec.output_gate_rank, inner)
        self.o_norm = RmsNorm(spec.head_dim, eps, dtype=dtype, device=device)
        self.o_proj = RowProjection(
            inner, hidden, self.tensor, "o_proj", dtype=dtype, device=device
        )

    def forward(self, x: Tensor, cache: StateCache | None = None, start: Start = 0) -> Tensor:
        """Returns the attended states.

        Args:
            cache: state and last inputs of the convolutions; x's take their place.
            start: position of the first state in x, on which nothing here depends, or the
                documents that x [1, T] is.
        """
        projections = [self.q_proj, self.k_proj, self.v_proj, self.b_proj]
        if self.spec.output_gate_rank is None:
            projections.append(self.g_proj)
        q, k, v, b, *gate = columns(self.tensor, x, projections, "qkv")
        if not gate:
            gate = [self.g_b_proj(self.tensor.gather(self.g_a_proj(x), "g_a_proj"))]
        z = self.f_b_proj(self.tensor.gather(self.f_a_proj(x), "f_a_proj"))
        if isinstance(start, Documents):  # the state begins anew with each
            out = region("core_attn", start.each(self._attend), q, k, v, z, b, keep=1)
        elif cache is None:
            out = region("core_attn", self._attend, q, k, v, z, b, keep=1)
        else:
            out = self._attend_from(cache, q, k, v, z, b)
        gated = gated_norm(out, self._heads(gate[0]), self.o_norm.weight, self.o_norm.eps)
        projected: Tensor = self.o_proj(gated.flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.spec.head_dim)

    def _rates(self, z: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (log-decays [B, S, H, K], rates [B, S, H]), at least fp32."""
        g = kda_gate(z, self.A_log, self.dt_bias, self.spec.decay_lower_bound or 0.0)
        return g, b.to(wide_dtype(b.dtype)).sigmoid()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor) -> Tensor:
        """Returns [B, S, H, K], in chunks of this rank's runs of each sequence."""
        width, context, shape = self.spec.head_dim, self.context, q.shape[:2]
        q, k, v, z, b = (context.by_runs(t) for t in (q, k, v, z, b))
        before = context.before_runs((q, k, v), self.spec.conv_kernel - 1)
        q = self._heads(short_conv(q, self.q_conv1d.weight, width, before[0]))
        k = self._heads(short_conv(k, self.k_conv1d.weight, width, before[1]))
        v = self._heads(short_conv(v, self.v_conv1d.weight, 0, before[2]))
        out = context.delta_rule(q, k, v, *self._rates(z, b), self.scale)
        return out.view(*shape, *out.shape[2:])

    def _attend_from(
        self, cache: StateCache, q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor
    ) -> Tensor:
        """Returns the same behind what the cache has seen; one token takes the recurrent form."""
        width = self.spec.head_dim
        befores = cache.shift(q, k, v)
        q = self._heads(short_conv(q, self.q_conv1d.weight, width, befores[0]))
        k = self._heads(short_conv(k, self.k_conv1d.weight, width, befores[1]))
        v = self._heads(short_conv(v, self.v_conv1d.weight, 0, befores[2]))
        rates = self._rates(z, b)
        if q.shape[1] == 1:
            q, k, v = (t.to(cache.state.dtype) for t in (q, k, v))
            out, state = recurrent(q, k, v, rates[0], rates[1], self.scale, cache.state)
        else:
            out, state = kda(q, k, v, *rates, self.scale, cache.state)
        cache.state.copy_(state)
        return out.to(b.dtype)
