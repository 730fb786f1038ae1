"""All checks of all kernels, at shapes for a card or small ones for a trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from flopwright.kernels.checks.activations import (
    activation_checks,
    fp8_verdicts,
    gated_fp8_verdicts,
)
from flopwright.kernels.checks.attention import attention_check
from flopwright.kernels.checks.compare import Check, Verdict, verify
from flopwright.kernels.checks.contenders import running
from flopwright.kernels.checks.experts import grouped_gemm_check, permute_check, unpermute_check
from flopwright.kernels.checks.kda import kda_check
from flopwright.kernels.checks.losses import cross_entropy_check, lk_check
from flopwright.kernels.checks.misc import histogram_verdict, mx_verdicts, newton_schulz_check
from flopwright.kernels.checks.norms import mla_check, norm_checks, rope_check

FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True, slots=True)
class Outcome:
    """What checking one op showed; `error` is the text of what it raised, if it did."""

    op: str
    verdicts: tuple[Verdict, ...]
    error: str = ""

    @property
    def passes(self) -> bool:
        """Whether every result was good enough."""
        return not self.error and all(v.passes for v in self.verdicts)


Group = Callable[[torch.device, torch.dtype, int, bool], list[Verdict]]


def _of(*checks: Check, dtype: torch.dtype, seed: int) -> list[Verdict]:
    return [v for check in checks for v in verify(check, dtype, seed)]


def _attention(device: torch.device, dtype: torch.dtype, seed: int, real: bool) -> list[Verdict]:
    shapes = (
        [((1, 700, 4, 4), (192, 128)), ((2, 513, 8, 1), (128, 128))]
        if real
        else [((1, 40, 2, 1), (24, 16))]
    )
    checks = [attention_check(s, w, dtype, device, seed=seed) for s, w in shapes]
    shape, widths = shapes[0]
    checks.append(attention_check(shape, widths, dtype, device, window=shape[1] // 3, seed=seed))
    checks.append(attention_check(shape, widths, dtype, device, size=8.0, seed=seed))
    return _of(*checks, dtype=dtype, seed=seed)


def _grouped(device: torch.device, dtype: torch.dtype, seed: int, real: bool) -> list[Verdict]:
    every = [[300, 0, 1, 129, 0, 640], [64] * 16, [0, 0, 1]] if real else [[5, 0, 1]]
    inner, out = (520, 328) if real else (24, 16)
    checks = [grouped_gemm_check(c, inner, out, dtype, device, seed) for c in every]
    return _of(*checks, dtype=dtype, seed=seed)


def _permute(device: torch.device, dtype: torch.dtype, seed: int, real: bool) -> list[Verdict]:
    tokens, top_k, experts, width = (500, 8, 64, 1000) if real else (6, 2, 5, 33)
    made = [c(tokens, top_k, experts, width, dtype, device, seed)
            for c in (permute_check, unpermute_check)]  # fmt: skip
    return _of(*made, dtype=dtype, seed=seed)


def _norms(device: torch.device, dtype: torch.dtype, seed: int, real: bool) -> list[Verdict]:
    shapes = [(700, 7168), (3, 5, 1000)] if real else [(2, 3, 40)]
    checks = [c for shape in shapes for c in norm_checks(shape, dtype, device, seed=seed)]
    return _of(*checks, dtype=dtype, seed=seed)


def _rope(device: torch.device, dtype: torch.dtype, seed: int, real: bool) -> list[Verdict]:
    heads, width = (64, 128) if real else (2, 8)
    shape = (2, 60 if real else 3, heads, width)
    return _of(
        rope_check(shape, 0, False, dtype, device, seed),
        rope_check(shape, width // 2, True, dtype, device, seed),
        mla_check(shape[:3], (width, width // 2, width), dtype, device, seed),
        dtype=dtype, seed=seed,
    )  # fmt: skip


def _gated(device: torch.device, dtype: torch.dtype, seed: int, real: bool) -> list[Verdict]:
    shape = (300, 2000) if real else (3, 130)
    return _of(*activation_checks(shape, dtype, device, 3.0, seed), dtype=dtype, seed=seed)


def _gated_fp8(device: torch.device, dtype: torch.dtype, seed: int, real: bool) -> list[Verdict]:
    shape = (300, 2000) if real else (3, 130)
    return [
        v for bounds in ([], [4.0, 25.0])
        for v in gated_fp8_verdicts(shape, bounds, dtype, device, seed)
    ]  # fmt: skip


def _fp8(device: torch.device, dtype: torch.dtype, seed: int, real: bool) -> list[Verdict]:
    rows, width = (1000, 3000) if real else (3, 200)
    return fp8_verdicts(rows, width, dtype, device, seed=seed)


def _mx(device: torch.device, dtype: torch.dtype, seed: int, real: bool) -> list[Verdict]:
    shape = (1000, 3000) if real else (3, 100)
    return [
        v for element in ("e2m1", "e4m3", "e5m2")
        for v in mx_verdicts(shape, element, dtype, device, seed=seed)
    ]  # fmt: skip


def _cross_entropy(
    device: torch.device, dtype: torch.dtype, seed: int, real: bool
) -> list[Verdict]:
    sizes = (300, 1000, 5000) if real else (5, 24, 150)
    return _of(cross_entropy_check(*sizes, dtype, device, seed=seed), dtype=dtype, seed=seed)


def _lk(device: torch.device, dtype: torch.dtype, seed: int, real: bool) -> list[Verdict]:
    sizes = (300, 256, 5000) if real else (5, 24, 150)
    return _of(lk_check(*sizes, dtype, device, seed), dtype=dtype, seed=seed)


def _kda(device: torch.device, dtype: torch.dtype, seed: int, real: bool) -> list[Verdict]:
    shapes = [((2, 300, 3), (128, 128))] if real else [((1, 18, 1), (16, 16))]
    return _of(
        *(kda_check(s, w, dtype, device, f, seed) for s, w in shapes for f in (1.0, 40.0)),
        dtype=dtype, seed=seed,
    )  # fmt: skip


def _schulz(device: torch.device, dtype: torch.dtype, seed: int, real: bool) -> list[Verdict]:
    shape = (3, 300, 700) if real else (2, 20, 30)
    return _of(newton_schulz_check(shape, dtype, device, seed), dtype=dtype, seed=seed)


def _histogram(device: torch.device, dtype: torch.dtype, seed: int, real: bool) -> list[Verdict]:
    return [histogram_verdict(*((4096, 896, 16, 1000) if real else (20, 9, 2, 50)), device, seed)]


GROUPS: dict[str, Group] = {
    "attention": _attention,
    "grouped_gemm": _grouped,
    "moe_permute": _permute,
    "rms_norm": _norms,
    "rope": _rope,
    "swiglu": _gated,
    "gated_fp8": _gated_fp8,
    "fp8_quantize": _fp8,
    "mx_quantize": _mx,
    "linear_cross_entropy": _cross_entropy,
    "lk_loss": _lk,
    "kda": _kda,
    "newton_schulz": _schulz,
    "balance_histogram": _histogram,
}


def outcomes(
    device: torch.device, seed: int, real: bool, kernel: str = "triton", ops: Iterable[str] = ()
) -> Iterator[Outcome]:
    """Yields what each op showed in fp32 and bf16; what one raises does not stop the others.

    Args:
        seed: of the random inputs.
        real: shapes of a size for a card, else small ones.
        kernel: which one the ops run where there is a choice.
        ops: names in GROUPS; all where empty.
    """
    for op in ops or GROUPS:
        for dtype in (FP32, BF16):
            yield _outcome(op, dtype, device, seed, real, kernel)


def _outcome(
    op: str, dtype: torch.dtype, device: torch.device, seed: int, real: bool, kernel: str
) -> Outcome:
    name = f"{op} {str(dtype).removeprefix('torch.')} {kernel}"
    try:
        with running("*", kernel):
            return Outcome(name, tuple(GROUPS[op](device, dtype, seed, real)))
    except Exception as error:  # reported, and the check fails
        return Outcome(name, (), f"{type(error).__name__}: {error}"[:500])
