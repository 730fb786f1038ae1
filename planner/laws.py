"""Scaling laws as published: what size, data, rate, batch and vocabulary a compute budget asks.

Each law names its source and the range it was fitted over; nothing here is fitted by us but
the power laws drawn through the tables of Moonlight and Kimi Linear.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

FLOPS_PER_PARAM_TOKEN: Final = 6.0  # 2 forward, 4 backward: arXiv 2001.08361
Range = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLaw:
    """L = E + A / N^alpha + B / D^beta, in nats a token; N parameters, D tokens."""

    name: str
    source: str
    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, params: float, tokens: float) -> float:
        """Returns the loss in nats a token."""
        return float(self.e + self.a / params**self.alpha + self.b / tokens**self.beta)

    def optimum(self, flops: float) -> tuple[float, float]:
        """Returns (N, D) of least loss under 6 N D = flops.

        The Lagrangian asks alpha A / N^alpha = beta B / D^beta, so with
        G = (alpha A / (beta B))^(1 / (alpha + beta)): N = G (C/6)^(beta / (alpha + beta)),
        D = (C/6) / N (arXiv 2203.15556, equation 4).
        """
        both = self.alpha + self.beta
        product = flops / FLOPS_PER_PARAM_TOKEN
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / both)
        params = g * product ** (self.beta / both)
        return params, product / params

    def flat_range(self, flops: float, nats: float) -> Range:
        """Returns the least and most N that lose at most `nats` against the optimum."""
        best, tokens = self.optimum(flops)
        limit = self.loss(best, tokens) + nats
        product = flops / FLOPS_PER_PARAM_TOKEN

        def edge(factor: float) -> float:
            inside, outside = best, best * factor
            while self.loss(outside, product / outside) <= limit:
                outside *= factor
            for _ in range(60):
                middle = math.sqrt(inside * outside)
                within = self.loss(middle, product / middle) <= limit
                inside, outside = (middle, outside) if within else (inside, middle)
            return inside

        return edge(0.5), edge(2.0)


REFIT: Final = LossLaw(
    name="refit",
    source="Chinchilla's third approach fitted again, arXiv 2404.10102",
    e=1.8172,
    a=482.01,
    b=2085.43,
    alpha=0.3478,
    beta=0.3658,
)
HOFFMANN: Final = LossLaw(
    name="hoffmann",
    source="Chinchilla's third approach, constants as printed, arXiv 2203.15556",
    e=1.69,
    a=406.4,
    b=410.7,
    alpha=0.34,
    beta=0.28,
)
LOSS_LAWS: Final = {law.name: law for law in (REFIT, HOFFMANN)}

# FLOPs that a model of this sparsity (experts / chosen) needs for the loss that sparsity 48
# reaches with one, at loss 1.5, 8 experts chosen and 1 shared: arXiv 2507.20534, section 2.3.
_SPARSITY_FLOPS: Final = ((8.0, 1.69), (16.0, 1.39), (32.0, 1.15), (48.0, 1.0))
SPARSITY_SOURCE: Final = "Kimi K2's sparsity law at loss 1.5, arXiv 2507.20534, section 2.3"


def sparsity_flops(sparsity: float) -> float | None:
    """Returns the FLOPs for equal loss relative to sparsity 48; None outside 8 to 48.

    Between the published points it is linear in the logarithms.
    """
    for (low, at_low), (high, at_high) in itertools.pairwise(_SPARSITY_FLOPS):
        if low <= sparsity <= high:
            share = math.log(sparsity / low) / math.log(high / low)
            return float(at_low * (at_high / at_low) ** share)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """Peak learning rate and tokens a step by one law.

    Attributes:
        inside: whether the run lies in the range that the law was fitted over.
    """

    law: str
    source: str
    learning_rate: float
    batch_tokens: float
    inside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the rate and batch laws ask of a run.

    Attributes:
        params: weights without embeddings and head, those active for a token.
        flops_per_token: without embeddings and head, attention included.
    """

    params: float
    tokens: float
    flops_per_token: float


def step_law(run: Run) -> Hyperparameters:
    """Returns Step Law's optimum: rate 1.79 N^-0.713 D^0.307, batch 0.58 D^0.571 tokens.

    arXiv 2503.04715: N without embeddings; fitted on dense AdamW runs with N of 60M to 1.07B
    and D of 2B to 100B, and checked on sparse ones.
    """
    return Hyperparameters(
        law="step_law",
        source="Step Law, arXiv 2503.04715 (AdamW)",
        learning_rate=1.79 * run.params**-0.713 * run.tokens**0.307,
        batch_tokens=0.58 * run.tokens**0.571,
        inside=6e7 <= run.params <= 1.07e9 and 2e9 <= run.tokens <= 1e11,
    )


def deepseek_law(run: Run) -> Hyperparameters:
    """Returns DeepSeek LLM's optimum: rate 0.3118 C^-0.125, batch 0.2920 C^0.3271 tokens.

    arXiv 2401.02954: C is non-embedding FLOPs a token times tokens, fitted from 1e17 to 2e19
    and used there up to its 67B model.
    """
    flops = run.flops_per_token * run.tokens
    return Hyperparameters(
        law="deepseek",
        source="DeepSeek LLM, arXiv 2401.02954 (AdamW, multi-step schedule)",
        learning_rate=0.3118 * flops**-0.1250,
        batch_tokens=0.2920 * flops**0.3271,
        inside=1e17 <= flops <= 2e19,
    )


# Parameters, tokens, learning rate, tokens a step.
Row = tuple[float, float, float, float]
# arXiv 2502.16982, table 2: dense models; batches are of 8,192-token sequences.
MOONLIGHT_ROWS: Final[tuple[Row, ...]] = (
    (399e6, 8.92e9, 9.503e-4, 96 * 8192.0),
    (545e6, 14.04e9, 9.143e-4, 128 * 8192.0),
    (822e6, 20.76e9, 8.825e-4, 160 * 8192.0),
    (1.1e9, 28.54e9, 8.561e-4, 192 * 8192.0),
    (1.5e9, 38.91e9, 8.305e-4, 256 * 8192.0),
)
# Kimi Linear's report, table 2: active parameters of MoE models, Muon; 4,096-token sequences.
KIMI_LINEAR_ROWS: Final[tuple[Row, ...]] = (
    (653e6, 38.8e9, 2.006e-3, 336 * 4096.0),
    (878e6, 59.8e9, 1.790e-3, 432 * 4096.0),
    (1.1e9, 85.2e9, 1.617e-3, 512 * 4096.0),
    (1.4e9, 102.5e9, 1.486e-3, 576 * 4096.0),
    (1.7e9, 128e9, 1.371e-3, 640 * 4096.0),
)


def moonlight_law(run: Run) -> Hyperparameters:
    """Returns rate and batch on the power laws of compute through Moonlight's table 2."""
    source = "power law through table 2 of Moonlight, arXiv 2502.16982 (Muon, dense)"
    return _through(MOONLIGHT_ROWS, "moonlight", source, run)


def kimi_linear_law(run: Run) -> Hyperparameters:
    """Returns rate and batch on the power laws of compute through Kimi Linear's table 2."""
    source = "power law through table 2 of Kimi Linear's report (Muon, MoE, active parameters)"
    return _through(KIMI_LINEAR_ROWS, "kimi_linear", source, run)


def _through(rows: Sequence[Row], law: str, source: str, run: Run) -> Hyperparameters:
    compute = [FLOPS_PER_PARAM_TOKEN * n * d for n, d, _, _ in rows]
    flops = FLOPS_PER_PARAM_TOKEN * run.params * run.tokens
    return Hyperparameters(
        law=law,
        source=source,
        learning_rate=_power_law(compute, [r for _, _, r, _ in rows], flops),
        batch_tokens=_power_law(compute, [b for _, _, _, b in rows], flops),
        inside=min(compute) <= flops <= max(compute),
    )


def _power_law(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """Returns the least-squares power law through points, at `at`."""
    logs_x, logs_y = [math.log(v) for v in x], [math.log(v) for v in y]
    mean_x, mean_y = sum(logs_x) / len(x), sum(logs_y) / len(y)
    pairs = zip(logs_x, logs_y, strict=True)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in pairs)
    slope /= sum((a - mean_x) ** 2 for a in logs_x)
    return math.exp(mean_y + slope * (math.log(at) - mean_x))


def hyperparameters(
    run: Run, optimizer: Literal["adamw", "muon"], *, moe: bool
) -> tuple[Hyperparameters, ...]:
    """Returns rate and batch by every law, the one nearest to the run's kind first."""
    adamw = (step_law(run), deepseek_law(run))
    muon = (moonlight_law(run), kimi_linear_law(run))
    if optimizer == "adamw":
        return (*adamw, *muon)
    return (*(reversed(muon) if moe else muon), *adamw)


VOCABULARY_SOURCE: Final = "scaling laws with vocabulary, arXiv 2407.13623"
# The tokens-a-character curve was fitted up to about this size and is flat beyond.
_MAX_FITTED_VOCABULARY: Final = 200_000


def vocabulary_params(non_vocabulary_params: float) -> tuple[float, float]:
    """Returns the optimal parameters of one vocabulary table, by two of the paper's approaches.

    By isoFLOP curves: N = 0.0834 C^0.5, Nv = 0.204 C^0.4164; by the derivative:
    Nv = 3.146M (N / 33M)^0.8354 (arXiv 2407.13623, constants as released with it). They hold
    where data grows with the model.
    """
    flops = (non_vocabulary_params / math.exp(-2.48465102)) ** 2
    by_flops = math.exp(-1.58903130) * flops**0.41636226
    by_derivative = 3_145_728 * (non_vocabulary_params / 33e6) ** 0.83539740
    return by_flops, by_derivative


def tokens_per_character(vocabulary: float) -> float:
    """Returns the tokens that one character of English web text takes, for a BPE vocabulary.

    0.006392 ln^2 V - 0.1581 ln V + 1.2047 (arXiv 2407.13623), flat beyond 200,000.
    """
    log = math.log(min(vocabulary, _MAX_FITTED_VOCABULARY))
    return 0.00639222 * log**2 - 0.15811069 * log + 1.20470122
