"""Checks of gated activations and of narrowing to FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.checks.compare import FAR, Check, Verdict, verify
from flopwright.kernels.checks.experts import draw
from flopwright.kernels.fp8_quantize import reference as fp8
from flopwright.kernels.fp8_quantize.op import (
    dequantize,
    dequantize_blocks,
    quantize,
    quantize_blocks,
)
from flopwright.kernels.swiglu import reference
from flopwright.kernels.swiglu.op import swiglu, swiglu_packed
from flopwright.kernels.swiglu.situ import gated_fp8, gated_fp8_packed, situ_glu

SITU_BOUNDS = (4.0, 25.0)
ONE_STEP_OFF = 0.05  # share of codes that may be the neighbour of the right one


def activation_checks(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, size: float = 1.0,
    seed: int = 0,
) -> list[Check]:  # fmt: skip
    """Returns SwiGLU, the same of packed inputs, and SiTU-GLU."""
    gate, up = (draw(seed + i, device, dtype, *shape) * size for i in range(2))
    both = torch.cat((gate, up), -1)
    return [
        Check(name=f"swiglu {shape}", op=swiglu, exact=reference.swiglu, tensors=(gate, up)),
        Check(
            name=f"swiglu_packed {shape}", op=swiglu_packed, exact=reference.swiglu_packed,
            tensors=(both,),
        ),
        Check(
            name=f"situ_glu {shape}", op=situ_glu, exact=reference.situ_glu, tensors=(gate, up),
            rest=SITU_BOUNDS,
        ),
    ]  # fmt: skip


def _order(codes: Tensor) -> Tensor:
    """Returns numbers that count the 8-bit floats in their order, so neighbours differ by 1."""
    bits = codes.view(torch.uint8).to(torch.int32)
    return torch.where(bits < 128, bits, 128 - bits)


def same_codes(name: str, found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> Verdict:
    """Returns whether scales are equal and enough codes are; the rest one step off at most."""
    steps = (_order(found[0]) - _order(exact[0])).abs()
    off = float((steps > 0).double().mean()) if steps.numel() else 0.0
    wrong = not torch.equal(found[1], exact[1]) or bool((steps > 1).any())
    return Verdict(name, FAR if wrong else off / ONE_STEP_OFF, off)


def fp8_verdicts(
    rows: int, width: int, dtype: torch.dtype, device: torch.device, size: float = 1.0,
    seed: int = 0,
) -> list[Verdict]:  # fmt: skip
    """Returns tiles of 1 x 128 and blocks of 128 x 128, there and back."""
    x = (draw(seed, device, dtype, rows, width) * size).to(dtype)
    x[rows // 2, : width // 2] = 0
    name = f"{rows} x {width} {str(dtype).removeprefix('torch.')}"
    found, exact = quantize(x), fp8.quantize(x)
    blocks, exact_blocks = quantize_blocks(x), fp8.quantize_blocks(x)
    back = dequantize(*exact, dtype), fp8.dequantize(*exact, dtype)
    back_blocks = (
        dequantize_blocks(*exact_blocks, dtype),
        fp8.dequantize_blocks(*exact_blocks, dtype),
    )
    return [
        same_codes(f"fp8 tiles {name}", found, exact),
        same_codes(f"fp8 blocks {name}", blocks, exact_blocks),
        Verdict(f"fp8 tiles back {name}", 0.0 if torch.equal(*back) else 2.0, 0.0),
        Verdict(f"fp8 blocks back {name}", 0.0 if torch.equal(*back_blocks) else 2.0, 0.0),
    ]


def gated_fp8_verdicts(
    shape: tuple[int, ...], bounds: list[float], dtype: torch.dtype, device: torch.device,
    seed: int = 0,
) -> list[Verdict]:  # fmt: skip
    """Returns the result, what is kept, and the gradients at what is kept."""
    gate, up = (draw(seed + i, device, dtype, *shape) for i in range(2))
    name = f"gated_fp8 {shape} {bounds}"
    plain = (lambda g, u: reference.situ_glu(g, u, *bounds)) if bounds else reference.swiglu
    _, g8, gs, u8, us = gated_fp8(gate.to(dtype), up.to(dtype), bounds)
    verdicts = [
        same_codes(f"{name} gate", (g8, gs), fp8.quantize(gate.to(dtype))),
        same_codes(f"{name} up", (u8, us), fp8.quantize(up.to(dtype))),
    ]
    value = Check(name=name, op=gated_fp8, exact=lambda g, u, _: plain(g, u), tensors=(gate, up),
                  rest=(bounds,), constant=frozenset({0, 1}))  # fmt: skip
    verdicts += verify(value, dtype)

    def at_kept(g: Tensor, u: Tensor, _: list[float]) -> Tensor:
        """Returns the activation, with its gradients taken at the kept numbers."""
        kept = (_through(g), _through(u))
        return plain(*kept)

    slopes = Check(name=f"{name} slopes", op=lambda g, u, b: gated_fp8(g, u, b)[0], exact=at_kept,
                   tensors=(gate, up), rest=(bounds,))  # fmt: skip
    packed = Check(name=f"{name} packed", op=lambda both, b: gated_fp8_packed(both, b)[0],
                   exact=lambda both, b: at_kept(*_halves(both), b),
                   tensors=(torch.cat((gate, up), -1),), rest=(bounds,))  # fmt: skip
    both = verify(slopes, dtype) + verify(packed, dtype)
    return verdicts + [v for v in both if "grad" in v.name]


def _halves(both: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = both.chunk(2, -1)
    return gate, up


def _through(x: Tensor) -> Tensor:
    """Returns x as FP8 keeps it, with the gradient of x itself."""
    wide = x.detach()
    kept = fp8.dequantize(*fp8.quantize(wide.float()), torch.float64).to(x.dtype)
    return x + (kept - wide)
