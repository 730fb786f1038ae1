"""Instruments that know nothing of any cost.py: a FLOP counter and a saved-bytes counter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flopwright.kernels.grouped_gemm import reference as grouped_reference
from flopwright.kernels.linear import reference as linear_reference
from flopwright.kernels.sparse_attention import reference as sparse_reference
from flopwright.models.transformer.module import Stage

# Ops whose time is the bytes they move; whatever they do inside is not counted.
BYTES_ONLY = {
    "rms_norm", "rms_norm_backward", "add_rms_norm", "add_rms_norm_backward",
    "layer_norm", "layer_norm_backward", "rope",
    "mla_key_value", "swiglu", "swiglu_packed", "route", "sort_by_expert",
    "permute", "unpermute", "cross_entropy", "embedding", "mla_key_value_backward",
    "swiglu_backward", "swiglu_packed_backward", "permute_backward", "unpermute_backward",
    "situ_glu", "situ_glu_backward", "situ_glu_packed", "situ_glu_packed_backward",
    "short_conv", "short_conv_backward", "kda_gate", "kda_gate_backward", "sigmoid_gate",
    "sigmoid_gate_backward", "gated_norm", "gated_norm_backward", "attn_res",
    "attn_res_backward", "balance_histogram", "relu2", "relu2_backward",
    "expert_bias", "expert_bias_backward", "clamped_glu_packed", "clamped_glu_packed_backward",
}  # fmt: skip
MATMUL_MARKERS = ("mm", "matmul", "dot", "conv", "attention", "linear", "einsum", "aten::mv")


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0) -> None:
    """Multiplies what the mask lets through, one query row at a time (values are irrelevant)."""
    heads = q.shape[2]
    q, k, v = (t.repeat_interleave(heads // t.shape[2], 2).transpose(1, 2) for t in (q, k, v))
    for i in range(q.shape[2]):
        seen = slice(max(0, i + 1 - window) if window else 0, i + 1)
        scores = q[:, :, i : i + 1] @ k[:, :, seen].transpose(-1, -2)
        scores @ v[:, :, seen]


def _causal_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    window: int = 0,
) -> None:  # fmt: skip
    heads = q.shape[2]
    q, k, v = (t.repeat_interleave(heads // t.shape[2], 2).transpose(1, 2) for t in (q, k, v))
    grad = grad.transpose(1, 2)
    for i in range(q.shape[2]):
        row, seen = slice(i, i + 1), slice(max(0, i + 1 - window) if window else 0, i + 1)
        p = q[:, :, row] @ k[:, :, seen].transpose(-1, -2)
        dp = grad[:, :, row] @ v[:, :, seen].transpose(-1, -2)
        dp @ k[:, :, seen]
        dp.transpose(-1, -2) @ q[:, :, row]
        p.transpose(-1, -2) @ grad[:, :, row]


def _any_counts(counts: Tensor, rows: int) -> Tensor:
    # Without data (meta) the split over experts is unknown, and FLOPs do not depend on it.
    return torch.tensor([rows] + [0] * (len(counts) - 1)) if counts.is_meta else counts


def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> None:
    grouped_reference.grouped_gemm(x, weight, _any_counts(counts, x.shape[0]))


def _grouped_input_gradient(grad: Tensor, weight: Tensor, counts: Tensor) -> None:
    for expert, part in _parts(grad, counts):
        grad[part] @ weight[expert]


def _grouped_weight_gradient(grad: Tensor, x: Tensor, counts: Tensor) -> None:
    for _, part in _parts(grad, counts):
        grad[part].t() @ x[part]


def _parts(grad: Tensor, counts: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, rows in enumerate(_any_counts(counts, grad.shape[0]).tolist()):
        yield expert, slice(start, start + rows)
        start += rows


def _kda(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
    """The products of chunks of 16: pairs, their inverse by doubling, states and changes."""
    _kda_chunks(q, v, outputs=True)


def _kda_backward(grad: Tensor, end: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
    _kda_chunks(q, v, outputs=False)  # the states once more
    _kda_chunks(q, v, outputs=False, state=False)  # each chunk once more
    n, c, (kk, vv) = _chunks(q), 16, (q.shape[-1], v.shape[-1])
    for _ in range(6):
        _product(n, c, kk, vv)
    for _ in range(4):
        _product(n, c, c, vv)
        _product(n, c, c, kk)


def _chunks(q: Tensor) -> int:
    return q.shape[0] * q.shape[2] * -(-q.shape[1] // 16)


def _product(n: int, a: int, b: int, c: int) -> None:
    torch.empty(n, a, b, device="meta") @ torch.empty(n, b, c, device="meta")


def _kda_chunks(q: Tensor, v: Tensor, outputs: bool, state: bool = True) -> None:
    n, c, k, w = _chunks(q), 16, q.shape[-1], v.shape[-1]
    for _ in range(2):
        _product(n, c, k, c)
    for _ in range(6):
        _product(n, c, c, c)
    _product(n, c, k, w)  # what the state knows of the keys
    _product(n, c, c, w)  # the inverse times the changes
    if state:
        _product(n, k, c, w)
    if outputs:
        _product(n, c, k, w)
        _product(n, c, c, w)


def _select_keys(q: Tensor, k: Tensor, weights: Tensor, top_k: int) -> None:
    """Scores what a query sees, a head at a time."""
    for i in range(q.shape[1]):
        q[:, i] @ k[:, : i + 1].transpose(-1, -2)


def _chosen(i: int, indices: Tensor | None) -> int:
    return i + 1 if indices is None else min(i + 1, indices.shape[-1])


def _selected(q: Tensor, keys: Tensor, indices: Tensor, v_width: int, scale: float) -> None:
    for i in range(q.shape[1]):
        scores = q[:, i] @ keys[:, : _chosen(i, indices)].transpose(-1, -2)
        scores @ keys[:, : _chosen(i, indices), :v_width]


def _selected_backward(
    grad: Tensor, q: Tensor, keys: Tensor, indices: Tensor, out: Tensor, lse: Tensor, scale: float
) -> None:
    for i in range(q.shape[1]):
        seen = keys[:, : _chosen(i, indices)]
        p = q[:, i] @ seen.transpose(-1, -2)
        dp = grad[:, i] @ seen[..., : out.shape[-1]].transpose(-1, -2)
        dp @ seen
        dp.transpose(-1, -2) @ q[:, i]
        p.transpose(-1, -2) @ grad[:, i]


def _index_loss(
    index_q: Tensor, index_k: Tensor, weights: Tensor, q: Tensor, keys: Tensor, lse: Tensor,
    indices: Tensor | None, scale: float,
) -> None:  # fmt: skip
    for i in range(q.shape[1]):
        count = _chosen(i, indices)
        if keys.ndim == 4:  # a key a head
            q[:, i].unsqueeze(2) @ keys[:, :count].permute(0, 2, 3, 1)
        else:
            q[:, i] @ keys[:, :count].transpose(-1, -2)
        dots = index_q[:, i] @ index_k[:, :count].transpose(-1, -2)
        dots @ index_k[:, :count]
        dots.transpose(-1, -2) @ index_q[:, i]


def _kda_summary(k: Tensor, v: Tensor, *rest: Any) -> None:
    """Chunks whose state has a column more for each key: the product of the transitions."""
    n, c, kk = _chunks(k), 16, k.shape[-1]
    columns = v.shape[-1] + kk
    for _ in range(2):
        _product(n, c, kk, c)
    for _ in range(6):
        _product(n, c, c, c)
    _product(n, c, kk, columns)
    _product(n, c, c, columns)
    _product(n, kk, c, columns)


def _kda_state_gradient(grad: Tensor, q: Tensor, k: Tensor, *rest: Any) -> None:
    n, c, kk, vv = _chunks(k), 16, k.shape[-1], grad.shape[-1]
    for _ in range(2):
        _product(n, c, kk, c)
        _product(n, c, c, vv)  # from the results to the changes, and through the inverse
        _product(n, kk, c, vv)  # into the state before: of the results and of the changes
    for _ in range(6):
        _product(n, c, c, c)
    _product(n, c, kk, vv)  # from the state behind to the changes


def _kda_carried(summaries: list[Tensor], own: list[int], back: bool) -> None:
    batch, heads, k, width = summaries[0].shape
    for _ in summaries[2:]:
        _product(batch * heads, k, k, width - k)


def _chained(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
    """The context's products; those of the chain are sums over a key's columns, as in a norm."""
    _causal_attention(q, k, v, scale)


def _lk_loss(x: Tensor, weight: Tensor, y: Tensor, goal_weight: Tensor) -> None:
    for _ in range(2):  # log-sum-exps, then the overlap
        x @ weight.t()
        y @ goal_weight.t()


def _lk_loss_backward(
    grad: Tensor, x: Tensor, weight: Tensor, y: Tensor, goal_weight: Tensor, kept: Tensor
) -> None:
    logits = x @ weight.t()
    y @ goal_weight.t()
    logits @ weight
    logits.t() @ x


DECOMPOSED: dict[str, Callable[..., Any]] = {
    "kda": _kda,
    "kda_backward": _kda_backward,
    "kda_summary": _kda_summary,
    "kda_state_gradient": _kda_state_gradient,
    "kda_carried": _kda_carried,
    "linear": linear_reference.linear,
    "attention": _causal_attention,
    "attention_backward": _causal_attention_backward,
    "attention_with_sinks": lambda q, k, v, sinks, *rest: _causal_attention(q, k, v, *rest),
    "chained_attention": _chained,
    "linear_lk_loss": _lk_loss,
    "linear_lk_loss_backward": _lk_loss_backward,
    "select_keys": _select_keys,
    "selected_attention": _selected,
    "selected_attention_backward": _selected_backward,
    "index_loss": _index_loss,
    "head_linear": sparse_reference.head_linear,
    "grouped_gemm": _grouped,
    "grouped_gemm_input_gradient": _grouped_input_gradient,
    "grouped_gemm_weight_gradient": _grouped_weight_gradient,
}


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of matrix products, our ops taken apart; refuses what it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        space, short = name.split("::")
        if space == "flopwright":
            if short in DECOMPOSED:
                with self:
                    DECOMPOSED[short](*args, **kwargs)
            else:
                assert short in BYTES_ONLY, f"unknown op {name}"
        elif name == "aten::matmul":
            with self:
                return func.decompose(*args, **kwargs)
        elif name in {"aten::mm", "aten::bmm"}:
            a, b = args[0], args[1]
            self.flops += 2 * a.numel() * b.shape[-1]
        else:
            assert not any(m in name for m in MATMUL_MARKERS), f"unknown product {name}"
        return func(*args, **kwargs)


def saved_bytes(stage: Stage, forward: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Returns the bytes of storages saved for backward, each once, and the forward's result.

    Parameters, buffers and the angle tables that all layers share are left out.
    """
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        seen[storage._cdata] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward()
    for t in (*stage.parameters(), *stage.buffers(), *stage.constants()):
        seen.pop(t.untyped_storage()._cdata, None)
    return sum(seen.values()), out


@pytest.fixture
def count_saved_bytes() -> Callable[[Stage, Callable[[], Tensor]], tuple[int, Tensor]]:
    return saved_bytes


@pytest.fixture
def flop_counter() -> type[FlopCounter]:
    return FlopCounter
