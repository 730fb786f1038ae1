"""What kernels' cost.py says is kept and multiplied, against tensors and counted products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flopwright.kernels.balance_histogram import reference as balance
from flopwright.kernels.fp8_quantize.cost import scale_bytes
from flopwright.kernels.fp8_quantize.op import quantize, quantize_blocks
from flopwright.kernels.kda.cost import kept_bytes, reported_flops
from flopwright.kernels.kda.op import kda
from flopwright.kernels.linear_cross_entropy import reference as head
from flopwright.kernels.linear_cross_entropy.cost import linear_cross_entropy as head_cost
from flopwright.kernels.linear_cross_entropy.cost import scratch_bytes
from flopwright.kernels.linear_cross_entropy.op import linear_cross_entropy
from flopwright.kernels.lk_loss import reference as lk
from flopwright.kernels.newton_schulz.cost import newton_schulz_flops
from flopwright.kernels.newton_schulz.reference import newton_schulz
from flopwright.kernels.swiglu.cost import kept_fp8_bytes
from flopwright.kernels.swiglu.situ import gated_fp8, situ_glu
from flopwright.ops import CostBuilder, Phase

BF16 = torch.bfloat16


def _saved(run: Callable[[], object]) -> int:
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        seen[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(seen.values())


@pytest.mark.parametrize("bounds", [[], [4.0, 25.0]])
def test_activations_that_keep_fp8(bounds: list[float]) -> None:
    gate, up = (torch.randn(3, 200, dtype=BF16, requires_grad=True) for _ in range(2))
    assert _saved(lambda: gated_fp8(gate, up, bounds)) == kept_fp8_bytes(3, 200)
    # Half of what the plain op keeps, and the scales.
    plain = _saved(lambda: situ_glu(gate, up, 4.0, 25.0))
    assert kept_fp8_bytes(3, 200) == plain / 2 + 2 * scale_bytes(3, 200)


def test_scales() -> None:
    x = torch.randn(130, 300)
    assert quantize(x)[1].nbytes == scale_bytes(130, 300)
    assert quantize_blocks(x)[1].nbytes == scale_bytes(130, 300, blocks=True)


def test_linear_attention_keeps_its_inputs() -> None:
    q, k, v = (torch.randn(1, 20, 2, 8, dtype=BF16, requires_grad=True) for _ in range(3))
    g, beta = -torch.rand(1, 20, 2, 8), torch.rand(1, 20, 2)
    assert _saved(lambda: kda(q, k, v, g, beta, 1.0)) == kept_bytes(20, 2, 8, 8, "bf16")
    # arXiv 2510.26692, equation 13, at d = 128 and C = 64.
    assert reported_flops(1, 128) == 6 * 128**2 + 3 * 64 * 128 + 64**2


def test_head_and_loss() -> None:
    tokens, hidden, vocab = 6, 16, 2048 + 128
    x = torch.randn(tokens, hidden, requires_grad=True)
    w = torch.randn(vocab, hidden, requires_grad=True)
    targets = torch.arange(tokens)
    kept = _saved(lambda: linear_cross_entropy(x, w, targets))
    assert kept == x.nbytes + w.nbytes + targets.nbytes + 2 * tokens * 4
    first, end = next(head.parts(vocab))
    assert (end - first) * tokens * 4 == scratch_bytes(tokens, vocab, "fp32")
    assert (end - first) * 8 < vocab
    cost = CostBuilder()
    head_cost(cost, "head", tokens=tokens, hidden=hidden, vocab=vocab, dtype="fp32")
    ops = cost.build().ops
    with FlopCounterMode(display=False) as forward:
        lse, _ = head.statistics(x.detach(), w.detach(), targets)
    assert ops.total_flops(Phase.FORWARD).item() == forward.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        for first, end in head.parts(vocab):
            part = (x.detach(), w.detach(), targets, lse, torch.ones(()), first, end)
            d = head.gradient_part(*part)
            torch.mm(d, w.detach()[first:end])  # torch's counter does not know `addmm_`
            torch.mm(d.t(), x.detach())
    found = ops.total_flops(Phase.BACKWARD_INPUT) + ops.total_flops(Phase.BACKWARD_WEIGHT)
    assert found.item() == backward.get_total_flops()


def test_loss_of_draft_heads() -> None:
    tokens, hidden, vocab = 4, 8, 300
    x, w, y, u = (torch.randn(s, hidden) for s in (tokens, vocab, tokens, vocab))
    none = torch.full((tokens,), -1)
    with FlopCounterMode(display=False) as forward:
        sides = [(s, m, head.statistics(s, m, none)[0]) for s, m in ((x, w), (y, u))]
        shared, below = lk.overlap(*sides)
    cost = CostBuilder()
    from flopwright.kernels.lk_loss.cost import linear_lk_loss

    linear_lk_loss(cost, "lk", tokens=tokens, hidden=hidden, vocab=vocab, dtype="fp32")
    ops = cost.build().ops
    assert ops.total_flops(Phase.FORWARD).item() == forward.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        for first, end in head.parts(vocab):
            d = lk.gradient_part(*sides, shared, below, torch.ones(()), first, end)
            torch.mm(d, w[first:end])
            torch.mm(d.t(), x)
    found = ops.total_flops(Phase.BACKWARD_INPUT) + ops.total_flops(Phase.BACKWARD_WEIGHT)
    assert found.item() == backward.get_total_flops()


def test_newton_schulz() -> None:
    with FlopCounterMode(display=False) as counted:
        newton_schulz(torch.randn(48, 80))
    assert newton_schulz_flops(48, 80) == counted.get_total_flops()
    # One tile is the whole product; of many, nearly half is left out of two of three.
    assert newton_schulz_flops(100, 100, "triton") == newton_schulz_flops(100, 100)
    many = newton_schulz_flops(12800, 12800, "triton") / newton_schulz_flops(12800, 12800)
    assert many == pytest.approx(2 / 3, rel=0.01)


def test_quantile_balancing_of_the_report() -> None:
    """Eight tokens, four experts, one choice: loads (4, 3, 1, 0) become (2, 2, 2, 2).

    The report prints the loads, not the scores; these have them. By linear programming's duality
    choices by score and bias that give every expert its share are those of the largest sum of
    scores, which scipy finds in another way.
    """
    scores = torch.tensor(
        [[58, 28, 24, 6], [37, 41, 62, 56], [57, 78, 38, 11], [58, 35, 14, 45],
         [54, 58, 20, 55], [59, 56, 53, 0], [85, 68, 57, 13], [72, 78, 26, 22]]
    ) / 100  # fmt: skip
    assert scores.argmax(1).bincount(minlength=4).tolist() == [4, 3, 1, 0]
    alpha = scores.topk(2).values[:, -1]
    bias = balance.biases(balance.histogram(scores, alpha, -1, 1, 1000), -1, 1, top_k=1)
    choices = (scores + bias).argmax(1)
    assert choices.bincount(minlength=4).tolist() == [2, 2, 2, 2]
    _, places = linear_sum_assignment(scores.repeat(1, 2), maximize=True)  # an expert twice
    assert choices.tolist() == (places % 4).tolist()
    exact = torch.quantile((alpha.unsqueeze(1) - scores).double(), 1 / 4, dim=0)
    assert (scores + exact).argmax(1).tolist() == choices.tolist()


def test_biases_of_a_histogram_are_exact_to_a_bin() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(4096, 16, generator=generator) + torch.linspace(0, 0.5, 16)
    top_k, bias = 4, torch.zeros(16)
    spreads = []
    for _ in range(8):
        biased = scores + bias
        loads = torch.zeros(16).scatter_add_(
            0, biased.topk(top_k).indices.flatten(), torch.ones(4096 * top_k)
        )
        spreads.append(float(loads.max() / loads.mean() - 1))
        alpha = biased.topk(top_k + 1).values[:, -1]
        low, high = float(bias.min()) - 1, float(bias.max()) + 1
        counts = balance.histogram(scores, alpha, low, high, 1000)
        assert counts.sum() == scores.numel()
        found = balance.biases(counts, low, high, top_k)
        # The exact quantile, without bins: b_j = quantile of alpha - s below k / n.
        exact = torch.quantile((alpha.unsqueeze(1) - scores).double(), top_k / 16, dim=0)
        np.testing.assert_allclose(found, exact - exact.mean(), atol=2 * (high - low) / 1000)
        bias = found.float()
    assert spreads[0] > 0.5
    assert spreads[-1] < 0.06


def test_overlap_is_one_less_the_total_variation() -> None:
    q, p = torch.randn(5, 9, dtype=torch.float64), torch.randn(5, 9, dtype=torch.float64)
    distance = (q.softmax(-1) - p.softmax(-1)).abs().sum(-1) / 2
    expected = -(1 - distance).log().mean()
    torch.testing.assert_close(lk.lk_loss(q, p), expected)
