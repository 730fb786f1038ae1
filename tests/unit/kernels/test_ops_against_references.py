"""Every op against plain torch, its gradients against finite differences, and opcheck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from flopwright.kernels.attention.op import attention, attention_with_max
from flopwright.kernels.balance_histogram.op import balance_histogram
from flopwright.kernels.cross_entropy.op import cross_entropy
from flopwright.kernels.embedding.op import embedding
from flopwright.kernels.fp8_quantize import op as fp8
from flopwright.kernels.grouped_gemm.op import grouped_gemm
from flopwright.kernels.kda import reference as kda_reference
from flopwright.kernels.kda.op import kda
from flopwright.kernels.layer_norm.op import layer_norm
from flopwright.kernels.linear.op import linear
from flopwright.kernels.linear_cross_entropy.op import linear_cross_entropy
from flopwright.kernels.lk_loss.op import linear_lk_loss
from flopwright.kernels.moe_permute.op import permute, sort_by_expert, unpermute
from flopwright.kernels.mx_quantize.op import mx_fake_quantize
from flopwright.kernels.newton_schulz.op import newton_schulz
from flopwright.kernels.rms_norm.op import add_rms_norm, rms_norm
from flopwright.kernels.rope.op import mla_key_value, rope
from flopwright.kernels.router.op import route
from flopwright.kernels.swiglu.op import swiglu, swiglu_packed
from flopwright.kernels.swiglu.situ import gated_fp8, gated_fp8_packed, situ_glu

TOKENS, EXPERTS, TOP_K = 6, 5, 2
FP32 = torch.float32


@dataclass(frozen=True)
class Case:
    op: Any
    args: Callable[[Callable[..., Tensor]], tuple[Any, ...]]
    oracle: Callable[..., Any]
    output: int | None = None  # which output the oracle gives, None for the only one


def _angles() -> tuple[Tensor, Tensor]:
    angle = torch.linspace(0, 7, 10, dtype=torch.float64).reshape(5, 2)
    return angle.cos(), angle.sin()


def _complex_rotation(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if not interleaved:
        half = x.shape[-1] // 2
        x = torch.stack((x[..., :half], x[..., half:]), -1).flatten(-2)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.complex(cos, sin)[:, None])
    return turned.flatten(-2) if interleaved else torch.cat((turned[..., 0], turned[..., 1]), -1)


def _rope(x: Tensor, cos: Tensor, sin: Tensor, start: int, interleaved: bool) -> Tensor:
    turned = _complex_rotation(x[..., start:], cos, sin, interleaved)
    return torch.cat((x[..., :start], turned), -1)


def _mla_keys(kv: Tensor, key: Tensor, cos: Tensor, sin: Tensor, nope: int) -> Tensor:
    turned = _complex_rotation(key[:, :, None], cos, sin, True)
    return torch.cat((kv[..., :nope], turned.expand(-1, -1, kv.shape[2], -1)), -1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        *heads_first, is_causal=True, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    seen = torch.tensor(
        [[i - window < j <= i for j in range(q.shape[1])] for i in range(q.shape[1])]
    )
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        *heads_first, attn_mask=seen, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _experts(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.einsum("nk,nmk->nm", x, weight[owner])


def _choices() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)]
    )


def _sorted() -> tuple[Tensor, Tensor]:
    order, place, _ = sort_by_expert(_choices(), EXPERTS)
    return order, place


def _unpermute(rows: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
    out = rows.new_zeros(TOKENS, rows.shape[1])
    flat = weights.reshape(-1)
    for i, source in enumerate(order.tolist()):
        out = out.index_add(0, torch.tensor([source // TOP_K]), (rows[i] * flat[source])[None])
    return out


def _sigmoid_weights(logits: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    score = logits.sigmoid()
    chosen = torch.topk(score if bias is None else score + bias, TOP_K).indices
    picked = torch.stack([score[t, chosen[t]] for t in range(TOKENS)])
    return picked / picked.sum(1, keepdim=True) * 2.5


def _softmax_weights(logits: Tensor, *args: Any) -> Tensor:
    return torch.topk(torch.softmax(logits, 1), TOP_K).values


def _overlap_loss(x: Tensor, w: Tensor, y: Tensor, u: Tensor) -> Tensor:
    draft, goal = F.log_softmax(x @ w.t(), -1), F.log_softmax((y @ u.t()).detach(), -1)
    # The overlap is one less the total variation distance.
    distance = (draft.exp() - goal.exp()).abs().sum(-1) / 2
    return -torch.log1p(-distance).mean()


def _kda_inputs(r: Callable[..., Tensor]) -> tuple[Any, ...]:
    """Returns 19 tokens (more than a chunk) of 2 heads, and a first state."""
    q, k = (F.normalize(r(1, 19, 2, 3), dim=-1) for _ in range(2))
    grows = q.requires_grad  # gradients of inputs as they are, not of what made them
    leaves = [q, k, r(1, 19, 2, 4), -r(1, 19, 2, 3).abs(), torch.sigmoid(r(1, 19, 2))]
    leaves = [x.detach().requires_grad_(grows) for x in leaves]
    return (*leaves, 0.6, r(1, 2, 3, 4))


CASES = {
    "attention_with_max": Case(
        attention_with_max,
        lambda r: (r(2, 7, 4, 6), r(2, 7, 2, 6), r(2, 7, 2, 3), 0.5),
        _sdpa,
        0,
    ),
    "add_rms_norm": Case(
        add_rms_norm,
        lambda r: (r(2, 3, 6), r(2, 3, 6), r(6), 1e-5),
        lambda x, y, w, e: F.rms_norm(x + y, (6,), w, e),
        0,
    ),
    "add_rms_norm_sum": Case(
        add_rms_norm,
        lambda r: (r(2, 3, 6), r(2, 3, 6), r(6), 1e-5),
        lambda x, y, w, e: x + y + 0 * w,
        1,
    ),
    "situ_glu": Case(
        situ_glu,
        lambda r: (r(3, 4), r(3, 4), 4.0, 25.0),
        lambda g, u, a, b: a * torch.tanh(g / a) * torch.sigmoid(g) * b * torch.tanh(u / b),
    ),
    "linear_cross_entropy": Case(
        linear_cross_entropy,
        lambda r: (r(TOKENS, 4), r(300, 4), torch.tensor([299, 0, 127, 128, 4, 2])),
        lambda x, w, t: F.cross_entropy((x @ w.t()).to(torch.promote_types(x.dtype, FP32)), t),
        0,
    ),
    "linear_lk_loss": Case(
        linear_lk_loss,
        lambda r: (r(TOKENS, 4), r(150, 4), r(TOKENS, 3).detach(), r(150, 3).detach()),
        _overlap_loss,
        0,
    ),
    "kda": Case(kda, _kda_inputs, lambda *a: kda_reference.recurrent(*a)[0], 0),
    "kda_state": Case(kda, _kda_inputs, lambda *a: kda_reference.recurrent(*a)[1], 1),
    "linear": Case(linear, lambda r: (r(2, 3, 4), r(5, 4)), F.linear),
    "linear_bias": Case(linear, lambda r: (r(2, 3, 4), r(5, 4), r(5)), F.linear),
    "linear_wide": Case(
        linear, lambda r: (r(6, 4), r(5, 4), None, True), lambda x, w, b, _: F.linear(x, w)
    ),
    "rms_norm": Case(
        rms_norm, lambda r: (r(2, 3, 6), r(6), 1e-5), lambda x, w, e: F.rms_norm(x, (6,), w, e), 0
    ),
    "layer_norm": Case(
        layer_norm,
        lambda r: (r(2, 3, 6), r(6), r(6), 1e-5),
        lambda x, w, b, e: F.layer_norm(x, (6,), w, b, e),
        0,
    ),
    "rope_interleaved": Case(rope, lambda r: (r(2, 5, 3, 7), *_angles(), 3, True), _rope),
    "rope_half": Case(rope, lambda r: (r(2, 5, 3, 4), *_angles(), 0, False), _rope),
    "mla_keys": Case(
        mla_key_value, lambda r: (r(2, 5, 3, 7), r(2, 5, 4), *_angles(), 3), _mla_keys, 0
    ),
    "mla_values": Case(
        mla_key_value,
        lambda r: (r(2, 5, 3, 7), r(2, 5, 4), *_angles(), 3),
        lambda kv, key, c, s, nope: kv[..., nope:],
        1,
    ),
    "attention_mla": Case(
        attention, lambda r: (r(2, 5, 2, 6), r(2, 5, 2, 6), r(2, 5, 2, 3), 0.3), _sdpa, 0
    ),
    "attention_gqa": Case(
        attention, lambda r: (r(2, 7, 4, 4), r(2, 7, 2, 4), r(2, 7, 2, 4), 0.5), _sdpa, 0
    ),
    "attention_window": Case(
        attention, lambda r: (r(2, 9, 4, 4), r(2, 9, 2, 4), r(2, 9, 2, 4), 0.5, 3), _windowed, 0
    ),
    "attention_wide_window": Case(
        attention, lambda r: (r(2, 9, 4, 4), r(2, 9, 2, 4), r(2, 9, 2, 4), 0.5, 9), _windowed, 0
    ),
    "swiglu": Case(swiglu, lambda r: (r(3, 4), r(3, 4)), lambda g, u: g * torch.sigmoid(g) * u),
    "swiglu_packed": Case(
        swiglu_packed, lambda r: (r(3, 8),), lambda x: F.silu(x[:, :4]) * x[:, 4:]
    ),
    "grouped_gemm": Case(
        grouped_gemm, lambda r: (r(7, 3), r(3, 2, 3), torch.tensor([3, 0, 4])), _experts
    ),
    "grouped_gemm_one_expert": Case(
        grouped_gemm, lambda r: (r(7, 3), r(3, 2, 3), torch.tensor([0, 7, 0])), _experts
    ),
    "permute": Case(
        permute, lambda r: (r(TOKENS, 3), *_sorted(), TOP_K), lambda x, o, p, k: x[o // k]
    ),
    "unpermute": Case(
        unpermute, lambda r: (r(TOKENS * TOP_K, 3), r(TOKENS, TOP_K), *_sorted()), _unpermute
    ),
    "route_sigmoid": Case(
        route,
        lambda r: (r(TOKENS, EXPERTS), None, None, TOP_K, 1, 1, False, True, 2.5),
        _sigmoid_weights,
        1,
    ),
    "route_softmax": Case(
        route,
        lambda r: (r(TOKENS, EXPERTS), None, None, TOP_K, 1, 1, True, False, 1.0),
        _softmax_weights,
        1,
    ),
    "route_softmax_normalised": Case(
        route,
        lambda r: (r(TOKENS, EXPERTS), None, None, TOP_K, 1, 1, True, True, 1.5),
        lambda x, *_: F.softmax(torch.topk(x, TOP_K).values, 1) * 1.5,
        1,
    ),
    "cross_entropy": Case(
        cross_entropy,
        lambda r: (r(TOKENS, 9), torch.tensor([1, 8, 0, 4, 4, 2])),
        F.cross_entropy,
        0,
    ),
    "embedding": Case(
        embedding,
        lambda r: (torch.tensor([[1, 0, 5], [5, 5, 2]]), r(6, 3)),
        lambda t, w: F.embedding(t, w),
    ),
}


def _random(dtype: torch.dtype, grad: bool = False) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> Tensor:
        t = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return t.requires_grad_(grad)

    return draw


def _take(case: Case, *args: Any) -> Tensor:
    out = case.op(*args)
    result: Tensor = out if case.output is None else out[case.output]
    return result


def _cast(args: tuple[Any, ...], dtype: torch.dtype, fixed: tuple[int, ...] = ()) -> list[Any]:
    def cast(i: int, a: Any) -> Any:
        if not (isinstance(a, Tensor) and a.is_floating_point()):
            return a
        return a.to(torch.promote_types(dtype, torch.float32) if i in fixed else dtype)

    return [cast(i, a) for i, a in enumerate(args)]


def _kept_wide(name: str) -> tuple[int, ...]:
    """Returns the arguments that are fp32 or wider whatever the activations are."""
    if name.startswith("route"):
        return (0,)
    if name.startswith("kda"):
        return (3, 4, 6)
    return (2, 3) if name.startswith("mla") else (1, 2) if name.startswith("rope") else ()


@pytest.mark.parametrize("name", CASES)
def test_forward_equals_plain_torch(name: str) -> None:
    case = CASES[name]
    args = case.args(_random(torch.float64))
    torch.testing.assert_close(_take(case, *args), case.oracle(*args), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 0.02)])
def test_lower_precision_stays_near_float64(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    case = CASES[name]
    args = _cast(case.args(_random(torch.float64)), dtype, _kept_wide(name))
    exact = case.oracle(*_cast(tuple(args), torch.float64))
    torch.testing.assert_close(
        _take(case, *args).double(), exact, rtol=tolerance, atol=2 * tolerance
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_finite_differences(name: str) -> None:
    case = CASES[name]
    assert torch.autograd.gradcheck(
        lambda *args: _take(case, *args), case.args(_random(torch.float64, grad=True))
    )


ADD_NORM = torch.ops.flopwright.add_rms_norm
UTILS = ("test_schema", "test_autograd_registration", "test_faketensor")


OPS = [n for n, case in CASES.items() if isinstance(case.op, CustomOpDef)]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    torch.library.opcheck(case.op, case.args(_random(dtype, grad=True)), test_utils=UTILS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in OPS if not n.startswith("route")])
def test_ops_are_traced_with_unknown_sizes(name: str) -> None:
    """As torch.compile does; the check itself cannot add up a router's integer choices."""
    args = CASES[name].args(_random(torch.float32, grad=True))
    torch.library.opcheck(CASES[name].op, args, test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_ops_without_a_gradient(dtype: torch.dtype) -> None:
    draw = _random(dtype)
    codes = fp8.quantize(draw(3, 200))
    blocks = fp8.quantize_blocks(draw(130, 200))
    for op, args in (
        (fp8.quantize, (draw(3, 200),)),
        (fp8.quantize_blocks, (draw(130, 200),)),
        (newton_schulz, (draw(2, 5, 3),)),
        (balance_histogram, (draw(6, 5), draw(6), -1.0, 1.0, 10)),
        (ADD_NORM, (draw(3, 4).requires_grad_(), draw(3, 4), draw(4), 1e-5)),
        (mx_fake_quantize, (draw(3, 40).requires_grad_(), "e2m1")),
        (gated_fp8, (draw(3, 200).requires_grad_(), draw(3, 200).requires_grad_(), [])),
        (gated_fp8_packed, (draw(3, 400).requires_grad_(), [4.0, 25.0])),
    ):
        torch.library.opcheck(op, args, test_utils=UTILS)
    # The schema test multiplies its inputs, which torch cannot do with 8-bit floats.
    for op, args in ((fp8.dequantize, codes), (fp8.dequantize_blocks, blocks)):
        torch.library.opcheck(op, (*args, dtype), test_utils="test_faketensor")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_their_inputs_dtype_and_layout(dtype: torch.dtype) -> None:
    for case in CASES.values():
        args = case.args(_random(dtype, grad=True))
        inputs = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        out = _take(case, *args)
        for tensor, grad in zip(
            inputs, torch.autograd.grad(out, inputs, torch.ones_like(out)), strict=True
        ):
            assert (grad.dtype, grad.shape) == (tensor.dtype, tensor.shape)


def _result_and_gradients(name: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    case, wide = CASES[name], _kept_wide(name)
    args = _cast(case.args(_random(torch.float64)), dtype, wide)
    args = [a.to(device) if isinstance(a, Tensor) else a for a in args]
    tables = () if name.startswith("route") else wide
    inputs = [
        a.requires_grad_()
        for i, a in enumerate(args)
        if isinstance(a, Tensor) and a.is_floating_point() and i not in tables
    ]
    out = _take(case, *args)
    return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_cpu_in_float64() -> None:
    for dtype, tolerance in ((torch.float32, 2e-3), (torch.bfloat16, 0.05)):
        for name in CASES:
            exact = _result_and_gradients(name, "cpu", torch.float64)
            found = _result_and_gradients(name, "cuda", dtype)
            for a, b in zip(found, exact, strict=True):
                torch.testing.assert_close(
                    a.double().cpu(), b, rtol=tolerance, atol=2 * tolerance, msg=name
                )


def test_sort_by_expert_is_stable_and_invertible() -> None:
    choices = _choices()
    order, place, counts = sort_by_expert(choices, EXPERTS)
    flat = choices.reshape(-1).tolist()
    assert order.tolist() == sorted(range(len(flat)), key=lambda i: (flat[i], i))
    assert place[order].tolist() == list(range(len(flat)))
    assert counts.tolist() == [flat.count(e) for e in range(EXPERTS)]


def test_attention_lse_is_the_log_of_the_softmax_sum() -> None:
    draw = _random(torch.float64)
    q, k, v = draw(1, 4, 2, 6), draw(1, 4, 1, 6), draw(1, 4, 1, 6)
    _, lse = attention(q, k, v, 0.7)
    for head in range(2):
        for i in range(4):
            scores = (k[0, : i + 1, 0] @ q[0, i, head]) * 0.7
            assert lse[0, head, i].item() == pytest.approx(torch.logsumexp(scores, 0).item())


@pytest.mark.parametrize("window", [0, 3, 200])
def test_attention_reference_backward_equals_the_op(window: int) -> None:
    from flopwright.kernels.attention import reference
    from flopwright.kernels.attention.op import attention_backward, recomputed_backward

    draw = _random(torch.float64)
    # 600 keys are more than one block of torch's kernel: whole blocks lie outside the window.
    q, k, v = draw(1, 600, 4, 6), draw(1, 600, 2, 6), draw(1, 600, 2, 3)
    out, lse = attention(q, k, v, 0.4, window)
    exact = reference.attention(q, k, v, 0.4, window)
    torch.testing.assert_close((out, lse), exact, rtol=1e-10, atol=1e-12)
    grad = draw(*out.shape)
    ours = attention_backward(grad, q, k, v, out, lse, 0.4, window)
    for theirs in (
        reference.attention_backward(grad, q, k, v, out, lse, 0.4, window),
        recomputed_backward(grad, q, k, v, 0.4, window),  # what CUDA runs
    ):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
