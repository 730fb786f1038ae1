"""Which kernel an op runs: plain torch, our Triton kernel, or a library's.

A CPU and float64 run the reference. On a GPU `choices.json` beside this file says, by op and
card, which of the two others was faster, when and by how much (`benchmarks/kernels.py --choose`
writes its entries); FLOPWRIGHT_KERNEL_RECORD names a result of that benchmark or of
`gpu_check.py` whose choices go before. What neither says is `PRIOR`. FLOPWRIGHT_KERNELS
overrides all: "library", "triton" or "reference" for all ops, or
"attention=library,rope=reference". A library that is not installed is never taken.
"""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal, cast, get_args

import torch
from torch import Tensor

from flopwright.errors import InputError
from flopwright.kernels.launch import INTERPRETED, target
from flopwright.kernels.libraries import missing

Kernel = Literal["reference", "triton", "library"]
VARIABLE: Final = "FLOPWRIGHT_KERNELS"
RECORD: Final = "FLOPWRIGHT_KERNEL_RECORD"
CHOICES: Final = Path(__file__).with_name("choices.json")


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel and why it is taken."""

    kernel: Kernel
    reason: str


OPS: Final = (
    "add_rms_norm", "attention", "attention_with_max", "balance_histogram", "fp8_quantize",
    "gated_fp8", "grouped_gemm", "kda", "linear_cross_entropy", "lk_loss", "moe_permute",
    "mx_quantize", "newton_schulz", "rms_norm", "rope", "situ_glu", "swiglu",
)  # fmt: skip
_NOT_MEASURED: Final = "not measured on a GPU: "
# Products of matrices are the vendors' best-kept kernels; the others write or read less than
# what torch composes.
PRIOR: Final[dict[str, Choice]] = {
    "attention": Choice("library", _NOT_MEASURED + "torch's flash kernel is FlashAttention-2"),
    "attention_with_max": Choice(
        "triton", _NOT_MEASURED + "finds the largest logits without a second pass"
    ),
    "grouped_gemm": Choice("library", _NOT_MEASURED + "torch._grouped_mm is CUTLASS"),
}
_OWN: Final = Choice("triton", _NOT_MEASURED + "one pass where torch makes several")


@cache
def measured() -> dict[str, dict[str, Choice]]:
    """Returns the measured choices by op, then card.

    Raises:
        InputError: the record is not there, or what it or `choices.json` says cannot be.
    """
    read: dict[str, dict[str, Choice]] = {}
    if CHOICES.is_file():
        for op, cards in json.loads(CHOICES.read_text(encoding="utf-8")).items():
            read[op] = {card: _choice(CHOICES.name, op, found) for card, found in cards.items()}
    record = os.environ.get(RECORD, "")
    for op, card, found in _recorded(record):
        read.setdefault(op, {})[card] = _choice(f"{RECORD}: {record}", op, found)
    return read


def _choice(where: str, op: str, found: object) -> Choice:
    """Returns what a file says of an op, checked."""
    _known(where, op)
    said = found if isinstance(found, dict) else {}
    kernel, reason = said.get("kernel"), said.get("reason")
    if kernel not in get_args(Kernel):
        raise InputError(f"{where}: {op}: kernel {kernel!r} is none of {_listed()}")
    if not isinstance(reason, str):
        raise InputError(f"{where}: {op}: no reason for {kernel}: what was measured, and when")
    return Choice(cast(Kernel, kernel), reason)


def _known(where: str, op: str) -> None:
    if op not in OPS:
        near = difflib.get_close_matches(op, OPS, 1)
        hint = f", did you mean {near[0]}?" if near else "."
        raise InputError(f"{where}: no op {op!r}{hint} Ops are {', '.join(OPS)}")


def _listed() -> str:
    return ", ".join(get_args(Kernel))


def _recorded(path: str) -> list[tuple[str, str, object]]:
    """Returns (op, card, choice) of a benchmark's result; nothing for no path.

    Raises:
        InputError: the file is not there, or no such result.
    """
    if not path:
        return []
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        found = found.get("speed", found)
        card = str(found["card"])
        return [(op, card, choice) for op, choice in found["choices"].items()]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{RECORD}: {path} is no result of benchmarks/kernels.py") from error


@cache
def overrides(text: str) -> dict[str, Kernel]:
    """Returns what the environment variable says by op; "*" is for all others."""
    found: dict[str, Kernel] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        op, _, kernel = part.rpartition("=")
        if kernel not in get_args(Kernel):
            raise InputError(f"{VARIABLE}: {kernel!r} is none of {_listed()}")
        if op and op != "*":
            _known(VARIABLE, op)
        found[op or "*"] = kernel  # type: ignore[assignment]
    return found


def choose(op: str, card: str) -> Choice:
    """Returns which kernel an op runs on a card, and why.

    Args:
        card: as torch.cuda.get_device_name says it.

    Raises:
        InputError: an op is told by name to run a library's kernel that is not here.
    """
    forced = overrides(os.environ.get(VARIABLE, ""))
    kernel = forced.get(op) or forced.get("*")
    if kernel is not None:
        choice = Choice(kernel, f"{VARIABLE} says so")
    else:
        choice = measured().get(op, {}).get(card) or PRIOR.get(op, _OWN)
    absent = missing(op) if choice.kernel == "library" else ""
    if not absent:
        return choice
    if op in forced:
        raise InputError(f"{VARIABLE}: {op}: {absent}")
    return Choice("triton", f"{absent}; otherwise: {choice.reason}")


def kernel_for(op: str, x: Tensor) -> Kernel:
    """Returns which kernel an op runs on this tensor."""
    if x.dtype == torch.float64:
        return "reference"
    if x.device.type == "cuda":
        return choose(op, _card(x.device)).kernel
    if INTERPRETED:  # a CPU runs our kernels only there, and only where told to
        return choose(op, "cpu").kernel if os.environ.get(VARIABLE) else "reference"
    return "reference"


@cache
def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def runs_triton(op: str, x: Tensor) -> bool:
    """Returns whether an op without a library rival runs our kernel on this tensor."""
    return kernel_for(op, x) == "triton"


def runs_e4m3(op: str, x: Tensor) -> bool:
    """Returns the same of an op that writes OCP's E4M3: other cards run the reference."""
    return runs_triton(op, x) and target(x.device).e4m3 == torch.float8_e4m3fn
