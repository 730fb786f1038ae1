"""Checks of RMSNorm, alone and behind a residual sum, and of rotary embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.checks.compare import Check
from flopwright.kernels.checks.experts import draw
from flopwright.kernels.rms_norm.op import add_rms_norm, rms_norm
from flopwright.kernels.rope import reference as rotary
from flopwright.kernels.rope.op import mla_key_value, rope

_EPS = 1e-6


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def norm_checks(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, size: float = 1.0,
    seed: int = 0,
) -> list[Check]:  # fmt: skip
    """Returns RMSNorm, and the sum with a residual and its norm."""
    x, y = (draw(seed + i, device, dtype, *shape) * size for i in range(2))
    weight = draw(seed + 2, device, dtype, shape[-1])

    def exact_sum(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + y
        # The sum leaves in the narrow format, and its norm is that of what leaves.
        kept = total + (total.detach().to(dtype).to(total.dtype) - total.detach())
        return _norm(kept, weight, eps), kept

    return [
        Check(
            name=f"rms_norm {shape} size {size:g}", op=lambda *a: rms_norm(*a)[0], exact=_norm,
            tensors=(x, weight), rest=(_EPS,),
        ),
        Check(
            name=f"add_rms_norm {shape} size {size:g}", op=add_rms_norm, exact=exact_sum,
            tensors=(x, y, weight), rest=(_EPS,), outputs=2,
        ),
    ]  # fmt: skip


def _angles(seq: int, pairs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angle = torch.arange(seq, dtype=torch.float64).outer(0.7 ** torch.arange(pairs))
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rope_check(
    shape: tuple[int, int, int, int], start: int, interleaved: bool, dtype: torch.dtype,
    device: torch.device, seed: int = 0,
) -> Check:  # fmt: skip
    """Returns the rotation of columns from `start` on of [B, S, H, W]."""
    cos, sin = _angles(shape[1], (shape[3] - start) // 2, device)
    return Check(
        name=f"rope {shape} from {start} {'pairs' if interleaved else 'halves'}",
        op=rope,
        exact=lambda x, *a: rotary.rope(x, a[0].to(x.dtype), a[1].to(x.dtype), *a[2:]),
        tensors=(draw(seed, device, dtype, *shape),),
        rest=(cos, sin, start, interleaved),
    )


def mla_check(
    shape: tuple[int, int, int], widths: tuple[int, int, int], dtype: torch.dtype,
    device: torch.device, seed: int = 0,
) -> Check:  # fmt: skip
    """Returns MLA's keys and values of (batch, positions, heads), (nope, rope, v) wide."""
    (batch, seq, heads), (nope, rotary_width, v_width) = shape, widths
    cos, sin = _angles(seq, rotary_width // 2, device)
    return Check(
        name=f"mla_key_value {shape} {widths}",
        op=mla_key_value,
        exact=lambda kv, key, c, s, n: rotary.mla_key_value(
            kv, key, c.to(kv.dtype), s.to(kv.dtype), n
        ),
        tensors=(
            draw(seed, device, dtype, batch, seq, heads, nope + v_width),
            draw(seed + 1, device, dtype, batch, seq, rotary_width),
        ),
        rest=(cos, sin, nope),
        outputs=2,
    )
