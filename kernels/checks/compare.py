"""What a kernel's result is held to, against plain torch in float64.

fp32: the largest error is at most twice that of torch's own op in fp32 on the same inputs,
plus 1e-6 of the largest exact number (of all gradients of the call, where a gradient is zero
in exact arithmetic: one token attends to itself whatever the logits are). bf16 and fp16: each
number by itself is within one unit in the last place of the exact one, plus what fp32
arithmetic may lose: everything is summed in fp32 and rounded once.

Kernels whose tensor-core products read an intermediate (attention's probabilities and their
gradients, the gradient of the losses' logits) round that too, as torch's own do: a sum of
rounded terms t errs by up to u * sum |t|, u the unit roundoff (2^-8 in bf16), whatever its
result is after cancellation. Each number is then held to one unit + u * (sum |t| - |exact| / 2):
half a unit goes to storing the result and is at least u * |exact| / 2. Checks of these ops say
what the sums are (`magnitude`). Two are held by the row (`by_row`): Newton-Schulz, which
iterates in the narrow format five times, and on a card the linear attention, whose products
are of TF32 there: one unit of the row's largest number, or twice the largest error of torch's
own op in the narrow format. Gradients of inputs that are fp32 whatever the format (log-decays,
weights of choices) leave in fp32 and are held to one narrow unit of the row's largest number:
decays over hundreds of nats have no more digits in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

Function = Callable[..., Tensor | tuple[Tensor, ...]]
TIMES_TORCH: Final = 2.0
OF_LARGEST: Final = 1e-6
_MANTISSA: Final = {torch.bfloat16: 7, torch.float16: 10}
FAR: Final = 1e30  # what is not a number; JSON has no infinity
_ZERO: Final = 1e-12  # of the other gradients: float64's own rounding
_LEAST_NORMAL: Final = {torch.bfloat16: -126, torch.float16: -14}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One op at one shape.

    Attributes:
        op: what is checked; takes `tensors` then `rest` and returns a tensor or several.
        exact: the same in plain torch, in the dtype of its inputs.
        rival: torch's own op; None where that is `exact` in fp32.
        tensors: its floating inputs in float64, already on the grid of the dtype.
        rest: its other inputs, as they are.
        wide: which of `tensors` are fp32 whatever the dtype (angles, weights of choices).
        constant: which get no gradient.
        outputs: which outputs are compared (and get a gradient), None for all.
        stiff: which outputs are compared and get no gradient.
        magnitude: sums of the sizes of rounded terms (see the module), of the float64 inputs,
            `rest` and the gradients that come: one tensor an output, `stiff` ones too, then
            one a gradient; None where nothing is rounded but results.
        by_row: whether it is held by the row.
    """

    name: str
    op: Function
    exact: Function
    tensors: Sequence[Tensor]
    rival: Function | None = None
    rest: tuple[Any, ...] = ()
    wide: frozenset[int] = frozenset()
    constant: frozenset[int] = frozenset()
    outputs: int = 1
    stiff: int = 0
    magnitude: Function | None = None
    by_row: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far one result is off.

    Attributes:
        worst: largest ratio of an error to what is allowed; at most 1 passes.
        error: the largest error over the largest exact number.
    """

    name: str
    worst: float
    error: float

    @property
    def passes(self) -> bool:
        """Whether the result is good enough."""
        return self.worst <= 1.0


def unit(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the unit in the last place of each number in a narrow format."""
    least = 2.0 ** _LEAST_NORMAL[dtype]
    _, e = torch.frexp(exact.abs().clamp_min(least))  # 0.5 <= mantissa < 1
    return torch.ldexp(torch.ones_like(exact), e - 1 - _MANTISSA[dtype])


def judge(
    name: str,
    found: Tensor,
    exact: Tensor,
    torchs: Tensor,
    dtype: torch.dtype,
    *,
    magnitude: Tensor | None = None,
    by_row: Tensor | None = None,
    wide: bool = False,
    around: float = 0.0,
) -> Verdict:
    """Returns how `found` stands to the exact float64 result.

    Args:
        torchs: the result of torch's own op in fp32.
        dtype: of the op's inputs: what intermediates are rounded to.
        magnitude: sum of the sizes of rounded terms, else None.
        by_row: torch's result in the narrow format where the op is held by the row, else None.
        wide: whether it is the gradient of an input that is fp32 whatever the dtype.
        around: the largest number of all gradients of the call.
    """
    assert found.shape == exact.shape, (name, found.shape, exact.shape)
    if exact.numel() == 0:
        return Verdict(name, 0.0, 0.0)
    largest = float(exact.abs().max())
    if largest < _ZERO * around:
        largest = around
    floor = TIMES_TORCH * float((torchs.double() - exact).abs().max()) + OF_LARGEST * largest
    allowed = torch.full_like(exact, floor)
    if found.dtype in _MANTISSA and by_row is None:
        allowed = allowed + unit(exact, found.dtype)
    rows = exact.abs().amax(-1, keepdim=True).expand_as(exact) if exact.ndim else exact
    if wide and dtype in _MANTISSA:
        allowed = allowed + unit(rows, dtype)
    if magnitude is not None:
        roundoff = 2.0 ** -(_MANTISSA[dtype] + 1)
        allowed = allowed + roundoff * (magnitude - exact.abs() / 2).clamp_min(0.0)
    if by_row is not None:
        own = TIMES_TORCH * float((by_row.double() - exact).abs().max())
        allowed = allowed + unit(rows, dtype).clamp_min(own)
    error = (found.double() - exact).abs()
    ratio = error / allowed.clamp_min(torch.finfo(torch.float64).tiny)
    ratio = torch.where(error == 0, torch.zeros_like(ratio), ratio)
    worst = FAR if bool(ratio.isnan().any()) else min(FAR, float(ratio.max()))
    return Verdict(
        name, worst, min(FAR, float(error.nan_to_num(FAR).max()) / max(largest, 1e-300))
    )


def _results(
    function: Function, check: Check, tensors: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the outputs, then the gradients of all inputs that have one."""
    leaves = [
        t.detach().clone().requires_grad_(i not in check.constant) for i, t in enumerate(tensors)
    ]
    out = function(*leaves, *check.rest)
    outs = out if isinstance(out, tuple) else (out,)
    outs = outs[: check.outputs + check.stiff]
    differentiable = outs[: check.outputs]
    given = [c.to(o.dtype) for c, o in zip(cotangents, differentiable, strict=True)]
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    if not inputs:
        return [o.detach() for o in outs]
    return [o.detach() for o in outs] + list(torch.autograd.grad(differentiable, inputs, given))


def verify(check: Check, dtype: torch.dtype, seed: int = 0) -> list[Verdict]:
    """Returns a verdict for each output and each gradient."""

    def cast(to: torch.dtype) -> list[Tensor]:
        wide = torch.promote_types(to, torch.float32)
        return [t.to(wide if i in check.wide else to) for i, t in enumerate(check.tensors)]

    given = cast(dtype)
    exact_inputs = [t.double() for t in given]
    with torch.no_grad():
        out = check.exact(*exact_inputs, *check.rest)
    outs = (out if isinstance(out, tuple) else (out,))[: check.outputs]
    draw = torch.Generator(device="cpu").manual_seed(seed)
    cotangents = [
        torch.randn(o.shape, generator=draw, dtype=torch.float64).to(dtype).double().to(o.device)
        for o in outs
    ]
    exact = _results(check.exact, check, exact_inputs, cotangents)
    rival = check.rival or check.exact
    torchs = _results(rival, check, [t.float() for t in exact_inputs], cotangents)
    found = _results(check.op, check, given, cotangents)
    sums: list[Tensor | None] = [None] * len(exact)
    rows: list[Tensor | None] = [None] * len(exact)
    if dtype in _MANTISSA and check.magnitude is not None:
        sums = list(check.magnitude(*exact_inputs, *check.rest, *cotangents))
    if dtype in _MANTISSA and check.by_row:
        rows = list(_results(rival, check, given, cotangents))
    outputs = check.outputs + check.stiff
    around = max((float(e.abs().max()) for e in exact[outputs:] if e.numel()), default=0.0)
    wide = [False] * outputs
    wide += [i in check.wide for i in range(len(check.tensors)) if i not in check.constant]
    return [
        judge(
            f"{name} {str(dtype).removeprefix('torch.')}", got, right, torchs_own, dtype,
            magnitude=terms, by_row=own, wide=wide[i], around=around if i >= outputs else 0.0,
        )
        for i, (name, got, right, torchs_own, terms, own) in enumerate(
            zip(_names(check), found, exact, torchs, sums, rows, strict=True)
        )
    ]  # fmt: skip


def _names(check: Check) -> list[str]:
    names = [f"out{i}" for i in range(check.outputs + check.stiff)]
    names += [f"grad{i}" for i in range(len(check.tensors)) if i not in check.constant]
    return [f"{check.name} {n}" for n in names]


def failures(verdicts: Sequence[Verdict]) -> str:
    """Returns a line for each result that is too far off; empty if there is none."""
    return "\n".join(
        f"{v.name}: {v.worst:.2f} of what is allowed, {v.error:.1e} of the largest"
        for v in verdicts
        if not v.passes
    )
