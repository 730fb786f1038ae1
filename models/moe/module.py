"""The mixture-of-experts block: router, dispatch, routed experts, shared experts.

T tokens of this rank, k choices a token, E experts, M width of an expert.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from flopwright.kernels.expert_bias.op import expert_bias
from flopwright.kernels.grouped_gemm.op import grouped_gemm
from flopwright.kernels.moe_permute.op import permute, sort_by_expert, unpermute
from flopwright.kernels.swiglu.clamped import clamped_glu_packed
from flopwright.models.gates import gated_packed
from flopwright.models.mlp.module import FeedForward
from flopwright.models.moe.dispatch import Dispatched, Dispatcher, LocalDispatch
from flopwright.models.moe.router import Router
from flopwright.models.norm.module import RmsNorm
from flopwright.models.parallel import ContextParallel, TensorParallel
from flopwright.models.projection.module import Adapter, Projection
from flopwright.models.saving import drops, narrow, region, remembered, running_again
from flopwright.spec.model import Mlp, ModelSpec

# Recompute groups of the activation between the experts' matrices.
ACTIVATION: Final = ("swiglu", "moe_act")
DOWN: Final = "moe_down"  # the recompute group of the experts' results


class Experts(nn.Module):
    """The routed experts that live on this rank, stacked along dimension 0.

    `first_expert` is the global number of the first one, `width` this rank's part of the
    inner width, `activation` its kind and bounds. Adapters are stacked like the weights.
    """

    gate_up_adapter: Adapter | None
    down_adapter: Adapter | None

    def __init__(
        self,
        local: int,
        first_expert: int,
        hidden: int,
        width: int,
        *,
        activation: Mlp,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.first_expert, self.activation = first_expert, activation

        def biases(width: int) -> nn.Parameter | None:
            empty = torch.empty(local, width, dtype=dtype, device=device)
            return nn.Parameter(empty) if bias else None

        self.gate_up_proj = nn.Parameter(
            torch.empty(local, 2 * width, hidden, dtype=dtype, device=device)
        )
        self.down_proj = nn.Parameter(
            torch.empty(local, hidden, width, dtype=dtype, device=device)
        )
        self.gate_up_proj_bias, self.down_proj_bias = biases(2 * width), biases(hidden)
        self.register_module("gate_up_adapter", None)
        self.register_module("down_adapter", None)

    def forward(
        self, rows: Tensor, counts: Tensor, part: Literal["all", "inner", "down"] = "all"
    ) -> Tensor:
        """Returns results [N, hidden] for rows grouped by local expert, `counts` rows each.

        Args:
            part: "inner" ends with the activation [N, width], "down" begins with it.
        """
        if part != "down":
            gate_up = _product(narrow(rows), self.gate_up_proj, self.gate_up_adapter, counts)
            rows = self._activated(_plus(gate_up, self.gate_up_proj_bias, counts))
        if part == "inner":
            return rows
        down = _product(rows, self.down_proj, self.down_adapter, counts)
        return _plus(down, self.down_proj_bias, counts)

    def _activated(self, gate_up: Tensor) -> Tensor:
        limit = self.activation.limit
        if limit is None:
            return gated_packed(ACTIVATION, gate_up, self.activation.bounds)
        clamped: Tensor = region(ACTIVATION, clamped_glu_packed, narrow(gate_up), limit)
        return clamped


def _product(rows: Tensor, weight: Tensor, adapter: Adapter | None, counts: Tensor) -> Tensor:
    """Returns each expert's rows times its matrix, and what its adapter adds."""
    out: Tensor = grouped_gemm(rows, weight, counts)
    if adapter is None:
        return out
    low: Tensor = grouped_gemm(rows, adapter.down, counts) * adapter.scale
    added: Tensor = grouped_gemm(low, adapter.up, counts)
    return out + added


def _plus(rows: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    out: Tensor = rows if bias is None else expert_bias(rows, bias, counts)
    return out


class MixtureOfExperts(nn.Module):
    """Routed plus shared experts: [B, S, hidden] to [B, S, hidden].

    Ranks that cut each expert hold expert_intermediate_size / etp_size of its inner width; their
    dispatcher sums the results.

    Attributes:
        routing_replay: [B * S, k] choices to take instead of the router's, None for its own.
        last_choices: [B * S, k] choices of the last forward pass.
        last_loads: [E] int64, this rank's tokens for each expert in the last forward pass.
        loads: [E] int64, the same summed over forward passes in training mode since
            `reset_loads`: what the bias update of a step of several micro-batches needs.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dispatcher: Dispatcher | None,
        ep_rank: int,
        ep_size: int,
        *,
        etp_size: int = 1,
        tensor: TensorParallel | None = None,
        context: ContextParallel | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        moe, hidden = spec.moe, spec.hidden_size
        assert moe is not None
        assert moe.num_experts % ep_size == 0
        local, width = moe.num_experts // ep_size, moe.expert_intermediate_size
        self.spec = moe
        self.dispatcher: Dispatcher = dispatcher or LocalDispatch()
        self.gate = Router(moe, hidden, tensor=tensor, context=context, dtype=dtype, device=device)
        assert width % etp_size == 0
        inside = moe.latent_size or hidden
        if moe.latent_size is not None:
            self.routed_expert_down_proj = Projection(hidden, inside, dtype=dtype, device=device)
            self.routed_expert_norm = RmsNorm(inside, spec.norm_eps, dtype=dtype, device=device)
            self.routed_expert_up_proj = Projection(inside, hidden, dtype=dtype, device=device)
        self.experts = Experts(
            local, ep_rank * local, inside, width // etp_size, activation=spec.mlp, bias=moe.bias,
            dtype=dtype, device=device,
        )  # fmt: skip
        self.shared_experts = (
            FeedForward(
                spec.mlp, hidden, moe.num_shared_experts * width, tensor=tensor,
                name="shared_experts", dtype=dtype, device=device,
            )
            if moe.num_shared_experts
            else None
        )  # fmt: skip
        self.routing_replay: Tensor | None = None
        self.last_choices: Tensor | None = None
        self.last_loads: Tensor | None = None
        self.loads: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Returns the weighted sum of each token's experts, plus the shared ones."""
        tokens = x.reshape(-1, x.shape[-1])
        replay = remembered(self.routing_replay)
        choices, weights = self.gate(tokens, replay, x.shape[0])
        order, place, counts = sort_by_expert(choices, self.spec.num_experts)
        self._record(choices, counts)
        latent = self.spec.latent_size is not None
        if latent:
            tokens = self.routed_expert_down_proj(tokens)
        sent = permute(tokens, order, place, self.spec.top_k)
        arrived = self.dispatcher.dispatch(sent, counts)
        returned = self._results(arrived)
        routed: Tensor = unpermute(returned, weights, order, place)
        if latent:
            normed = region("norm", self.routed_expert_norm, routed)
            routed = self.routed_expert_up_proj(normed)
        routed = routed.view(x.shape)
        if self.shared_experts is not None:
            routed = routed + region("shared_experts", self.shared_experts, x)
        return routed

    def _results(self, arrived: Dispatched) -> Tensor:
        """Returns the experts' results in the order the rows were sent."""
        rows, counts, handle = arrived.rows, arrived.counts, arrived.handle
        if not drops(DOWN):
            return self.dispatcher.combine(self.experts(rows, counts), handle)
        # Two calls of the module: what shards its weights sees each of them.
        inner = self.experts(rows, counts, "inner")
        return region(DOWN, self._down, inner, counts, handle)

    def _down(self, inner: Tensor, counts: Tensor, handle: Any) -> Tensor:
        return self.dispatcher.combine(self.experts(inner, counts, "down"), handle)

    def _record(self, choices: Tensor, counts: Tensor) -> None:
        if running_again():  # for the backward pass: the forward has recorded it
            return
        self.last_choices, self.last_loads = choices, counts
        if self.training and torch.is_grad_enabled():
            self.loads = counts.clone() if self.loads is None else self.loads + counts

    def reset_loads(self) -> None:
        """Forgets the step's loads; call it after the bias update."""
        self.loads = None
        self.gate.reset_counts()
