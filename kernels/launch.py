"""How Triton kernels are launched, and for what: a card, the interpreter, a compiler alone.

Wrappers in `kernel.py` choose block sizes by `target(device)` and start their kernels with
`launch`. Inside `recording(target)` nothing runs: the launches are noted with the types that
their arguments have, so that what is compiled without a GPU is what would run on one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

# Triton decides when it decorates a kernel whether to interpret it.
INTERPRETED: Final = os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a kernel is made for.

    Attributes:
        name: "sm_90", "gfx942", or "interpreter".
        shared_bytes: shared memory that one program can have (LDS on AMD).
        warp: threads that go together.
        e4m3: the 8-bit format of 4 exponent bits that the card converts to, None for none.
    """

    name: str
    shared_bytes: int
    warp: int = 32
    e4m3: torch.dtype | None = torch.float8_e4m3fn

    @property
    def amd(self) -> bool:
        """Whether it is an AMD card."""
        return self.name.startswith("gfx")


# Shared memory a program: NVIDIA's CUDA programming guide, technical specifications by compute
# capability; AMD's CDNA 3 ISA, 64 KiB of LDS. E4M3 conversion: PTX ISA, cvt, from sm_89 on;
# CDNA 3 has the variant without infinities and negative zero.
TARGETS: Final = {
    "sm_80": Target(name="sm_80", shared_bytes=163 * 1024, e4m3=None),
    "sm_86": Target(name="sm_86", shared_bytes=99 * 1024, e4m3=None),
    "sm_89": Target(name="sm_89", shared_bytes=99 * 1024),
    "sm_90": Target(name="sm_90", shared_bytes=227 * 1024),
    "sm_100": Target(name="sm_100", shared_bytes=227 * 1024),
    "sm_103": Target(name="sm_103", shared_bytes=227 * 1024),
    "sm_120": Target(name="sm_120", shared_bytes=99 * 1024),
    "gfx942": Target(name="gfx942", shared_bytes=64 * 1024, warp=64, e4m3=torch.float8_e4m3fnuz),
    "gfx950": Target(name="gfx950", shared_bytes=160 * 1024, warp=64),
    "interpreter": Target(name="interpreter", shared_bytes=2**30),
}


class UnsupportedKernelError(RuntimeError):
    """A kernel that the card's instructions do not allow; the message names the card."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that was noted down: the kernel, its arguments by name and its options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int


@dataclass(slots=True)
class Recording:
    """The launches for one target."""

    target: Target
    launches: list[Launch] = field(default_factory=list)


_recording: Recording | None = None


@contextmanager
def recording(target: Target) -> Iterator[Recording]:
    """Notes down the launches inside in place of making them; tensors may be meta tensors."""
    global _recording
    before, _recording = _recording, Recording(target)
    try:
        yield _recording
    finally:
        _recording = before


def target(device: torch.device) -> Target:
    """Returns what kernels on this device are made for; cards not listed count as the nearest."""
    if _recording is not None:
        return _recording.target
    if INTERPRETED or device.type != "cuda":
        return TARGETS["interpreter"]
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = found.gcnArchName.split(":")[0]
        return TARGETS.get(name, TARGETS["gfx942"])
    name = f"sm_{found.major}{found.minor}"
    return TARGETS.get(name) or TARGETS["sm_90" if found.major >= 9 else "sm_86"]


def card_name(device: torch.device) -> str:
    """Returns the card's name with its target, for messages."""
    if _recording is not None or INTERPRETED or device.type != "cuda":
        return target(device).name
    return f"{torch.cuda.get_device_name(device)} ({target(device).name})"


def e4m3_dtype(device: torch.device) -> torch.dtype:
    """Returns the 8-bit format that kernels write on this device.

    Raises:
        UnsupportedKernelError: the card has no such conversion.
    """
    found = target(device).e4m3
    if found is None:
        raise UnsupportedKernelError(
            f"{card_name(device)} has no E4M3 conversion: it needs compute capability 8.9 or more"
        )
    return found


def launch(
    kernel: Any,
    grid: Sequence[int],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 2,
    **constants: Any,
) -> None:
    """Starts a kernel on the device of its first tensor; an empty grid starts nothing.

    Args:
        args: in the order of the kernel's parameters.
        constants: its `tl.constexpr` parameters.
    """
    if 0 in grid:
        return
    if _recording is not None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | constants
        _recording.launches.append(Launch(kernel, tuple(grid), given, num_warps, num_stages))
        return
    first = next(a for a in args if isinstance(a, Tensor))
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        kernel[tuple(grid)](*args, **constants, num_warps=num_warps, num_stages=num_stages)


def rows_of(x: Tensor) -> Tensor:
    """Returns x as [rows, width] with unit column stride: a view where strides allow."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def unit_columns(x: Tensor) -> Tensor:
    """Returns x with numbers of a row next to each other: itself where they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def ceil_div(a: int, b: int) -> int:
    """Returns a / b rounded up."""
    return -(-a // b)


def power_of_2(n: int, least: int = 1) -> int:
    """Returns the smallest power of two that is at least n and `least`."""
    return max(least, 1 << max(0, n - 1).bit_length())
