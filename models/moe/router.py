"""The router: a linear map to expert logits, the choice, and the load-balancing bias."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from flopwright.kernels.balance_histogram.op import balance_histogram
from flopwright.kernels.balance_histogram.reference import biases
from flopwright.kernels.linear.op import linear
from flopwright.kernels.linear.reference import wide_dtype
from flopwright.kernels.router.op import route
from flopwright.models.moe.balance import balanced
from flopwright.models.moe.cost import SCORE_BINS
from flopwright.models.parallel import (
    ContextParallel,
    TensorParallel,
    WholeMatrices,
    WholeSequences,
)
from flopwright.models.saving import running_again
from flopwright.spec.model import Moe


def _without_data(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


class Router(nn.Module):
    """Chooses experts for tokens; never sharded, every rank holds all of it.

    Scores are computed in fp32 or wider. `e_score_correction_bias` is a buffer of at least
    fp32: steps of 0.001 would vanish in bf16.

    Attributes:
        balance_share: weight of a micro-batch's balance loss: 1 / micro-batches of a step.
        counts: [E, SCORE_BINS] int64, under quantile balancing this rank's histogram of what
            experts lack to be chosen, over forward passes in training since `reset_counts`.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        spec: Moe,
        hidden: int,
        *,
        tensor: TensorParallel | None = None,
        context: ContextParallel | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.tensor, self.context = tensor or WholeMatrices(), context or WholeSequences()
        self.weight = nn.Parameter(
            torch.empty(spec.num_experts, hidden, dtype=dtype, device=device)
        )
        row = torch.empty(spec.num_experts, dtype=dtype, device=device)
        self.bias = nn.Parameter(row) if spec.bias else None
        biased = spec.router == "sigmoid_noaux_tc"
        bias = torch.zeros(spec.num_experts, dtype=wide_dtype(dtype), device=device)
        self.register_buffer("e_score_correction_bias", bias if biased else None)
        self.balance_share = 1.0
        self.counts: Tensor | None = None
        self._range: tuple[float, float] | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        cast = self.e_score_correction_bias
        if bias is not None and cast is not None and cast.dtype != wide_dtype(cast.dtype):
            self.e_score_correction_bias = bias.to(cast.device)
        return self

    def forward(
        self, x: Tensor, replay: Tensor | None = None, sequences: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Returns (experts [T, k] int64, weights [T, k]) for tokens x [T, hidden].

        Args:
            replay: choices to take instead of its own; the weights stay the router's.
            sequences: how many sequences the tokens are, for the sequence-wise balance loss.
        """
        spec = self.spec
        logits = linear(x, self.weight, self.bias, True)
        choices, weights, _ = route(
            logits,
            self.e_score_correction_bias,
            replay,
            spec.top_k,
            spec.num_groups,
            spec.top_k_groups,
            spec.router == "softmax",
            spec.norm_top_k_prob,
            spec.routed_scaling_factor,
        )
        if spec.balance == "quantile" and self.training and torch.is_grad_enabled():
            self._count(logits)
        if spec.sequence_balance_loss and self.training and torch.is_grad_enabled():
            weights = balanced(
                weights,
                logits,
                choices,
                sequences=sequences,
                softmax=spec.router == "softmax",
                coefficient=spec.sequence_balance_loss * self.balance_share / self._summed_over,
                together=self._whole_sequences,
            )
        return choices, weights

    @property
    def _summed_over(self) -> int:
        """Ranks whose tokens' gradients are summed, not averaged."""
        return self.tensor.size if self.tensor.sequence_parallel else 1

    def _whole_sequences(self, fractions: Tensor) -> Tensor:
        own = self.tensor.mean_over_tokens(fractions, "gate.fractions")
        return self.context.mean_over_tokens(own, "gate.fractions")

    @torch.no_grad()
    def update_bias_(self, loads: Tensor) -> None:
        """Moves the bias by the update rate towards equal loads (arXiv 2408.15664).

        b_i <- b_i + rate * sign(mean load - load_i), once a step after the optimizer.

        Args:
            loads: [num_experts] tokens each expert saw in the step, over all ranks.
        """
        bias = self.e_score_correction_bias
        if bias is not None:
            # Whole numbers: a step of 67 million tokens counts past what fp32 can tell apart.
            below = torch.sign(loads.sum() - loads * loads.numel()).to(bias.dtype)
            bias.add_(below, alpha=self.spec.bias_update_rate)

    @torch.no_grad()
    def _count(self, logits: Tensor) -> None:
        """Adds the tokens to the histogram: what stands between each score and the (k + 1)-th."""
        if running_again():
            return
        bias, scores = self.e_score_correction_bias, torch.sigmoid(logits)
        assert bias is not None
        top = min(self.spec.top_k + 1, self.spec.num_experts)
        alpha = (scores + bias).topk(top, -1).values[:, -1]
        low, high = self._bounds(bias)
        counts = balance_histogram(scores, alpha, low, high, SCORE_BINS).to(torch.int64)
        self.counts = counts if self.counts is None else self.counts + counts

    def _bounds(self, bias: Tensor) -> tuple[float, float]:
        """Returns what the histogram spans: scores are in (0, 1), so are their differences."""
        if self._range is None:
            empty = _without_data(bias)
            low, high = (0.0, 0.0) if empty else (float(bias.min()), float(bias.max()))
            self._range = low - 1, high + 1
        return self._range

    @torch.no_grad()
    def update_quantiles_(self, counts: Tensor) -> None:
        """Sets the bias so that every expert would have had its share of the step's tokens.

        Args:
            counts: as `counts`, summed over all ranks that saw other tokens.
        """
        bias = self.e_score_correction_bias
        assert bias is not None
        if _without_data(counts):
            return
        bias.copy_(biases(counts, *self._bounds(bias), self.spec.top_k))

    def reset_counts(self) -> None:
        """Forgets the histogram and its span; call it after `update_quantiles_`."""
        self.counts, self._range = None, None
