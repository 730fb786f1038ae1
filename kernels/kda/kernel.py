"""Kimi Delta Attention as Triton kernels: chunks in order, states in registers.

A program goes through the chunks of one head for a part of the value width. Decays between
two tokens of a chunk are taken from the difference of their sums, so that nothing overflows
however fast a channel forgets. The backward pass runs the forward again to write the state
before each chunk, then goes through the chunks from the last; what it sums over the value
width is summed over its parts by torch. The formulas are those of `reference.chunked`.

Products of narrow inputs are made of fp32 intermediates in TF32 (10 bits of mantissa where
bf16 has 7), those of fp32 inputs of three TF32 products; the inverse of a chunk in full fp32.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.device import cast
from flopwright.kernels.kda.tiles import Tiles, tiles
from flopwright.kernels.launch import ceil_div, launch, power_of_2, target


@triton.jit
def _row(x, here, j):
    """Returns row j of x."""
    return tl.sum(tl.where((here == j)[:, None], x, 0.0), 0)


@triton.jit
def _decayed(total, k, here, j):
    """Returns e^(G_i - G_j) k_j for i >= j, else 0, as [C, K]."""
    gap = tl.minimum(total - _row(total, here, j)[None, :], 0.0)
    return tl.where((here >= j)[:, None], tl.exp(gap), 0.0) * _row(k, here, j)[None, :]


@triton.jit
def _pairs(q, k, total, here, C: tl.constexpr):
    """Returns (q_i . e^(G_i - G_j) k_j on and below, k_i . the same below the diagonal)."""
    of_q = tl.zeros((C, C), dtype=tl.float32)
    of_k = tl.zeros((C, C), dtype=tl.float32)
    for j in range(C):
        decayed = _decayed(total, k, here, j)
        column = (here == j)[None, :]
        of_q = tl.where(column, tl.sum(q * decayed, 1)[:, None], of_q)
        of_k = tl.where(column, tl.sum(k * decayed, 1)[:, None], of_k)
    return of_q, tl.where(here[:, None] > here[None, :], of_k, 0.0)


@triton.jit
def _product(a, b, P: tl.constexpr):
    """Returns a @ b of fp32 operands."""
    return tl.dot(a, b, input_precision=P)


@triton.jit
def _dot(a, b, acc, P: tl.constexpr):
    """Returns a @ b + acc of fp32 operands."""
    return tl.dot(a, b, acc, input_precision=P)


@triton.jit
def _inverse(below, here, C: tl.constexpr, DOUBLINGS: tl.constexpr):
    """Returns (I + below)^-1 of a strictly lower matrix: the product of I + (-below)^(2^n)."""
    power = -below
    found = tl.where(here[:, None] == here[None, :], 1.0, 0.0) + power
    for _ in tl.static_range(DOUBLINGS):
        power = _product(power, power, "ieee")
        found = _dot(found, power, found, "ieee")
    return found


@triton.jit
def _chunk(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, n, b, h, scale, tokens, heads, k_width, v_width, here,
    ck, cv, C: tl.constexpr, DOUBLINGS: tl.constexpr,
):  # fmt: skip
    """Loads chunk n of a head, and makes of it what does not depend on the state.

    Returns (q, k, v, beta, G, the last row of G, pairs of q, pairs of k, (I + beta pairs)^-1,
    places of its tokens, of keys and of values, and which of the three are there).
    """
    t = n * C + here
    there = t < tokens
    place = (b * tokens + t) * heads + h
    in_k = there[:, None] & (ck < k_width)[None, :]
    in_v = there[:, None] & (cv < v_width)[None, :]
    at_k = place[:, None] * k_width + ck[None, :]
    at_v = place[:, None] * v_width + cv[None, :]
    k = tl.load(k_ptr + at_k, mask=in_k, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + at_v, mask=in_v, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at_k, mask=in_k, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + at_k, mask=in_k, other=0.0).to(tl.float32) * scale
    beta = tl.load(beta_ptr + place, mask=there, other=0.0).to(tl.float32)
    total = tl.cumsum(g, 0)
    of_q, of_k = _pairs(q, k, total, here, C)
    inverse = _inverse(of_k * beta[:, None], here, C, DOUBLINGS)
    last = tl.sum(g, 0)
    return q, k, v, beta, total, last, of_q, of_k, inverse, place, at_k, at_v, there, in_k, in_v


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, begin_ptr, o_ptr, end_ptr, states_ptr, scale, tokens,
    heads, k_width, v_width, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DOUBLINGS: tl.constexpr, P: tl.constexpr, BEGIN: tl.constexpr,
    STATES: tl.constexpr,
):  # fmt: skip
    """STATES: writes the state before each chunk in place of the results."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    here = tl.arange(0, C)
    ck = tl.arange(0, K)
    cv = tl.program_id(1) * V + tl.arange(0, V)
    in_state = (ck < k_width)[:, None] & (cv < v_width)[None, :]
    at_state = ck[:, None] * v_width + cv[None, :]
    state = tl.zeros((K, V), dtype=tl.float32)
    if BEGIN:
        begin = begin_ptr + (b * heads + h) * k_width * v_width
        state = tl.load(begin + at_state, mask=in_state, other=0.0).to(tl.float32)
    chunks = tl.cdiv(tokens, C)
    for n in range(chunks):
        (q, k, v, beta, total, last, of_q, _of_k, inverse, _place, _at_k, at_v, _there, _in_k,
         in_v) = (
            _chunk(
                q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, n, b, h, scale, tokens, heads, k_width,
                v_width, here, ck, cv, C, DOUBLINGS,
            )
        )  # fmt: skip
        grown = tl.exp(total)
        if STATES:
            to = states_ptr + ((b * heads + h) * chunks + n) * k_width * v_width
            tl.store(to + at_state, state, mask=in_state)
        right = beta[:, None] * (v - _product(grown * k, state, P))
        change = _product(inverse, right, "ieee")
        if not STATES:
            o = _product(grown * q, state, P)
            o = _dot(of_q, change, o, P)
            tl.store(o_ptr + at_v, cast(o, o_ptr.dtype.element_ty), mask=in_v)
        rest = tl.exp(last[None, :] - total) * k
        state = _dot(tl.trans(rest), change, state * tl.exp(last)[:, None], P)
    if not STATES:
        to = end_ptr + (b * heads + h) * k_width * v_width
        tl.store(to + at_state, state, mask=in_state)


@triton.jit
def _backward(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, states_ptr, do_ptr, dend_ptr, dq_ptr, dk_ptr, dv_ptr,
    dg_ptr, dbeta_ptr, dbegin_ptr, scale, tokens, heads, k_width, v_width, numbers,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DOUBLINGS: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """Gradients; those of q, k, g and beta are this part's of the value width.

    `numbers` is how many tokens there are in all, over batch and heads.
    """
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    part = tl.program_id(1).to(tl.int64)
    here = tl.arange(0, C)
    ck = tl.arange(0, K)
    cv = tl.program_id(1) * V + tl.arange(0, V)
    in_state = (ck < k_width)[:, None] & (cv < v_width)[None, :]
    at_state = ck[:, None] * v_width + cv[None, :]
    whole = (b * heads + h) * k_width * v_width
    ds = tl.load(dend_ptr + whole + at_state, mask=in_state, other=0.0).to(tl.float32)
    chunks = tl.cdiv(tokens, C)
    lower = here[:, None] >= here[None, :]
    strict = here[:, None] > here[None, :]
    for step in range(chunks):
        n = chunks - 1 - step
        (q, k, v, beta, total, last, of_q, of_k, inverse, place, at_k, at_v, there, in_k, in_v) = (
            _chunk(
                q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, n, b, h, scale, tokens, heads, k_width,
                v_width, here, ck, cv, C, DOUBLINGS,
            )
        )  # fmt: skip
        do = tl.load(do_ptr + at_v, mask=in_v, other=0.0).to(tl.float32)
        grown = tl.exp(total)
        rest = tl.exp(last[None, :] - total) * k
        begin = states_ptr + ((b * heads + h) * chunks + n) * k_width * v_width
        state = tl.load(begin + at_state, mask=in_state, other=0.0)
        misses = v - _product(grown * k, state, P)
        change = _product(inverse, beta[:, None] * misses, "ieee")

        d_change = _product(tl.trans(of_q), do, P)
        d_change = _dot(rest, ds, d_change, P)
        d_pairs = tl.where(lower, _product(do, tl.trans(change), P), 0.0)
        d_grown_q = _product(do, tl.trans(state), P)
        d_rest = _product(change, tl.trans(ds), P)
        through = tl.exp(last) * tl.sum(state * ds, 1)
        d_right = _product(tl.trans(inverse), d_change, "ieee")
        d_below = tl.where(strict, -_product(d_right, tl.trans(change), P), 0.0)
        d_misses = beta[:, None] * d_right
        d_beta = tl.sum(d_right * misses, 1) + tl.sum(d_below * of_k, 1)
        d_grown_k = -_product(d_misses, tl.trans(state), P)
        ds = ds * tl.exp(last)[:, None]
        ds = _dot(tl.trans(grown * q), do, ds, P)
        ds -= _product(tl.trans(grown * k), d_misses, P)
        tl.store(dv_ptr + at_v, cast(d_misses, dv_ptr.dtype.element_ty), mask=in_v)

        d_of_k = d_below * beta[:, None]
        dq = grown * d_grown_q
        dk_row = grown * d_grown_k
        dk_column = tl.exp(last[None, :] - total) * d_rest
        behind = k * dk_column
        shift = part * numbers
        to_g = dg_ptr + (shift + (b * tokens + n * C) * heads + h) * k_width + ck
        for j in range(C):
            # What decays over token j: from before it, which is all that rows hold so far, to
            # it and later ones, and from before it to behind the chunk. No differences.
            over = tl.where((here >= j)[:, None], q * dq + k * dk_row, behind)
            mask = (ck < k_width) & (n * C + j < tokens)
            tl.store(to_g + j * heads * k_width, tl.sum(over, 0) + through, mask=mask)
            gap = tl.minimum(total - _row(total, here, j)[None, :], 0.0)
            decay = tl.where((here >= j)[:, None], tl.exp(gap), 0.0)
            column = (here == j)[None, :]
            to_q = tl.sum(tl.where(column, d_pairs, 0.0), 1)[:, None] * decay
            to_k = tl.sum(tl.where(column, d_of_k, 0.0), 1)[:, None] * decay
            key = _row(k, here, j)[None, :]
            dq += to_q * key
            dk_row += to_k * key
            mine = tl.sum(to_q * q + to_k * k, 0)[None, :]
            dk_column += tl.where((here == j)[:, None], mine, 0.0)
        out = shift * k_width + at_k
        tl.store(dq_ptr + out, dq * scale, mask=in_k)
        tl.store(dk_ptr + out, dk_row + dk_column, mask=in_k)
        tl.store(dbeta_ptr + shift + place, d_beta, mask=there)
    tl.store(dbegin_ptr + whole + at_state, ds, mask=in_state)


def _constants(t: Tiles, q: Tensor, columns: int, v_width: int) -> dict[str, int | str]:
    wide = "tf32x3" if q.dtype == torch.float32 else "tf32"
    return {
        "P": "ieee" if target(q.device).amd else wide,
        "C": t.chunk, "K": power_of_2(q.shape[-1], 16),
        "V": min(columns, power_of_2(v_width, 16)), "DOUBLINGS": t.chunk.bit_length() - 2,
    }  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor | None,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (o, the last state fp32); with `states` only those before each chunk are written."""
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    batch, tokens, heads, k_width = q.shape
    v_width = v.shape[-1]
    o = v.new_empty(v.shape)
    end = v.new_empty(batch, heads, k_width, v_width, dtype=torch.float32)
    t = tiles(target(q.device))
    constants = _constants(t, q, t.forward, v_width)
    launch(
        _forward, (batch * heads, ceil_div(v_width, int(constants["V"]))), q, k, v, g, beta,
        end if state is None else state.contiguous(), o, end, end if states is None else states,
        scale, tokens, heads, k_width, v_width, BEGIN=state is not None,
        STATES=states is not None, **constants, num_warps=t.warps, num_stages=1,
    )  # fmt: skip
    return o, end


def chunks(tokens: int, q: Tensor) -> int:
    """Returns the chunks whose states the backward pass writes."""
    return ceil_div(tokens, tiles(target(q.device)).chunk)


def backward(
    grad: Tensor, grad_end: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    scale: float, state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k, v, g, beta and of the first state."""
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    batch, tokens, heads, k_width = q.shape
    v_width = v.shape[-1]
    states = q.new_empty(batch, heads, chunks(tokens, q), k_width, v_width, dtype=torch.float32)
    forward(q, k, v, g, beta, scale, state, states)
    t = tiles(target(q.device))
    constants = _constants(t, q, t.backward, v_width)
    parts = ceil_div(v_width, int(constants["V"]))
    dq, dk, dg = (q.new_empty(parts, *q.shape, dtype=torch.float32) for _ in range(3))
    dbeta = q.new_empty(parts, *beta.shape, dtype=torch.float32)
    dv = v.new_empty(v.shape)
    dbegin = q.new_empty(batch, heads, k_width, v_width, dtype=torch.float32)
    launch(
        _backward, (batch * heads, parts), q, k, v, g, beta, states, grad.contiguous(),
        grad_end.contiguous(), dq, dk, dv, dg, dbeta, dbegin, scale, tokens, heads, k_width,
        v_width, batch * tokens * heads, **constants, num_warps=t.backward_warps, num_stages=1,
    )  # fmt: skip
    return (
        dq.sum(0).to(q.dtype), dk.sum(0).to(k.dtype), dv, dg.sum(0).to(g.dtype),
        dbeta.sum(0).to(beta.dtype), dbegin,
    )  # fmt: skip
