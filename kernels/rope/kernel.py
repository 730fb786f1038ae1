"""Rotary embedding as a Triton kernel: pairs turned in fp32, other columns copied."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.device import cast
from flopwright.kernels.launch import ceil_div, launch, power_of_2

_HEADS: Final = 16  # heads of a position that a program turns


@triton.jit
def _turn(
    x_ptr, y_ptr, cos_ptr, sin_ptr, seq, heads, width, start, pairs, row_stride, head_stride,
    out_stride, out_head, sign,
    INTERLEAVED: tl.constexpr, H: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Turns columns from `start` on, and copies those before it.

    Angles are those of the row's position in its sequence; sign -1 turns back.
    """
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * H + tl.arange(0, H)
    x = x_ptr + row * row_stride + h[:, None] * head_stride
    y = y_ptr + row * out_stride + h[:, None] * out_head
    there = (h < heads)[:, None]
    if C:
        column = tl.arange(0, C)[None, :]
        before = there & (column < start)
        tl.store(y + column, tl.load(x + column, mask=before), mask=before)
    pair = tl.arange(0, P)[None, :]
    inside = there & (pair < pairs)
    table = row % seq * pairs + pair
    cos = tl.load(cos_ptr + table, mask=pair < pairs, other=0.0)
    sin = tl.load(sin_ptr + table, mask=pair < pairs, other=0.0) * sign
    if INTERLEAVED:
        first, second = start + 2 * pair, start + 2 * pair + 1
    else:
        first, second = start + pair, start + pairs + pair
    a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + first, cast(a * cos - b * sin, y_ptr.dtype.element_ty), mask=inside)
    tl.store(y + second, cast(b * cos + a * sin, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _keys(
    kv_ptr, key_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, seq, heads, nope, v_width, pairs,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """MLA's keys and values of some heads of one position."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * H + tl.arange(0, H)
    there = (h < heads)[:, None]
    at = row * heads + h[:, None]
    kv = kv_ptr + at * (nope + v_width)
    keys, values = keys_ptr + at * (nope + 2 * pairs), values_ptr + at * v_width
    column = tl.arange(0, N)[None, :]
    mask = there & (column < nope)
    tl.store(keys + column, tl.load(kv + column, mask=mask), mask=mask)
    column = tl.arange(0, V)[None, :]
    mask = there & (column < v_width)
    tl.store(values + column, tl.load(kv + nope + column, mask=mask), mask=mask)
    pair = tl.arange(0, P)[None, :]
    cos = tl.load(cos_ptr + row % seq * pairs + pair, mask=pair < pairs, other=0.0)
    sin = tl.load(sin_ptr + row % seq * pairs + pair, mask=pair < pairs, other=0.0)
    key = key_ptr + row * 2 * pairs + 2 * pair
    a = tl.load(key, mask=pair < pairs, other=0.0).to(tl.float32)
    b = tl.load(key + 1, mask=pair < pairs, other=0.0).to(tl.float32)
    first = tl.broadcast_to(cast(a * cos - b * sin, keys_ptr.dtype.element_ty), (H, P))
    second = tl.broadcast_to(cast(b * cos + a * sin, keys_ptr.dtype.element_ty), (H, P))
    mask = there & (pair < pairs)
    tl.store(keys + nope + 2 * pair, first, mask=mask)
    tl.store(keys + nope + 2 * pair + 1, second, mask=mask)


@triton.jit
def _keys_backward(
    dk_ptr, dv_ptr, cos_ptr, sin_ptr, dkv_ptr, dkey_ptr, seq, heads, nope, v_width, pairs,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Gradients of one position's latent and shared key: the latter a sum over the heads."""
    row = tl.program_id(0).to(tl.int64)
    a = tl.zeros((P,), dtype=tl.float32)
    b = tl.zeros((P,), dtype=tl.float32)
    pair = tl.arange(0, P)
    for start in range(0, heads, H):
        h = start + tl.arange(0, H)
        there = (h < heads)[:, None]
        at = row * heads + h[:, None]
        dk, dkv = dk_ptr + at * (nope + 2 * pairs), dkv_ptr + at * (nope + v_width)
        column = tl.arange(0, N)[None, :]
        mask = there & (column < nope)
        tl.store(dkv + column, tl.load(dk + column, mask=mask), mask=mask)
        column = tl.arange(0, V)[None, :]
        mask = there & (column < v_width)
        tl.store(
            dkv + nope + column, tl.load(dv_ptr + at * v_width + column, mask=mask), mask=mask
        )
        mask = there & (pair < pairs)[None, :]
        turned = dk + nope + 2 * pair[None, :]
        a += tl.sum(tl.load(turned, mask=mask, other=0.0).to(tl.float32), 0)
        b += tl.sum(tl.load(turned + 1, mask=mask, other=0.0).to(tl.float32), 0)
    cos = tl.load(cos_ptr + row % seq * pairs + pair, mask=pair < pairs, other=0.0)
    sin = tl.load(sin_ptr + row % seq * pairs + pair, mask=pair < pairs, other=0.0)
    dkey = dkey_ptr + row * 2 * pairs + 2 * pair
    tl.store(dkey, cast(a * cos + b * sin, dkey_ptr.dtype.element_ty), mask=pair < pairs)
    tl.store(dkey + 1, cast(b * cos - a * sin, dkey_ptr.dtype.element_ty), mask=pair < pairs)


def _positions(x: Tensor) -> Tensor:
    """Returns x [B, S, H, W] whose rows of a position are equally far apart over B and S."""
    even = x.stride(0) == x.shape[1] * x.stride(1) or x.shape[0] == 1
    return x if even and x.stride(3) == 1 else x.contiguous()


def turn(
    x: Tensor, cos: Tensor, sin: Tensor, start: int, interleaved: bool, back: bool = False
) -> Tensor:
    """Returns x with its last dimension rotated from column `start` on, or `back`."""
    x = _positions(x)
    batch, seq, heads, width = x.shape
    pairs = (width - start) // 2
    y = x.new_empty(x.shape)
    h = min(_HEADS, power_of_2(heads))
    launch(
        _turn, (batch * seq, ceil_div(heads, h)), x, y, cos.contiguous(), sin.contiguous(), seq,
        heads, width, start, pairs, x.stride(1), x.stride(2), y.stride(1), y.stride(2),
        -1.0 if back else 1.0, INTERLEAVED=interleaved, H=h, P=power_of_2(pairs),
        C=power_of_2(start) if start else 0,
    )  # fmt: skip
    return y


def mla_key_value(
    kv: Tensor, key: Tensor, cos: Tensor, sin: Tensor, nope: int
) -> tuple[Tensor, Tensor]:
    """Returns MLA's keys and values; see `reference.mla_key_value`."""
    kv, key = kv.contiguous(), key.contiguous()
    batch, seq, heads, both = kv.shape
    rotary, v_width = key.shape[-1], both - nope
    keys = kv.new_empty(batch, seq, heads, nope + rotary)
    values = kv.new_empty(batch, seq, heads, v_width)
    h = min(_HEADS, power_of_2(heads))
    launch(
        _keys, (batch * seq, ceil_div(heads, h)), kv, key, cos.contiguous(), sin.contiguous(),
        keys, values, seq, heads, nope, v_width, rotary // 2, H=h, P=power_of_2(rotary // 2),
        N=power_of_2(nope), V=power_of_2(v_width),
    )  # fmt: skip
    return keys, values


def mla_key_value_backward(
    grad_keys: Tensor, grad_values: Tensor, cos: Tensor, sin: Tensor, nope: int
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the latent and of the shared key."""
    grad_keys, grad_values = grad_keys.contiguous(), grad_values.contiguous()
    batch, seq, heads, v_width = grad_values.shape
    rotary = grad_keys.shape[-1] - nope
    grad_kv = grad_keys.new_empty(batch, seq, heads, nope + v_width)
    grad_key = grad_keys.new_empty(batch, seq, rotary)
    launch(
        _keys_backward, (batch * seq,), grad_keys, grad_values, cos.contiguous(),
        sin.contiguous(), grad_kv, grad_key, seq, heads, nope, v_width, rotary // 2,
        H=min(_HEADS, power_of_2(heads)), P=power_of_2(rotary // 2), N=power_of_2(nope),
        V=power_of_2(v_width),
    )  # fmt: skip
    return grad_kv, grad_key
