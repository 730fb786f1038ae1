"""Kernels compiled without a GPU: registers, spills and shared memory of each, by target.

What is compiled is what a wrapper launched under `launch.recording`, with the argument types
and the divisibility that Triton's own launcher would find. Static figures: no speed follows.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from flopwright.kernels.launch import Launch, Target

_TYPES: Final = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2: "fp8e5",
}
_ALIGNED: Final = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        registers: 32-bit registers a thread (vector registers on AMD, accumulators among them).
        spill_bytes: stored to local memory for want of registers (registers * 4 on AMD).
        shared_bytes: of one program.
        tensor_core: the matrix instruction in it ("wgmma", "tcgen05", "mma", "mfma", "").
    """

    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    num_stages: int
    tensor_core: str


def signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Returns (type by parameter, constants, attributes) as Triton's launcher specialises."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[Any, Any] = {}
    for place, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            types[name] = f"*{_TYPES[value.dtype]}"
            attributes[(place,)] = _ALIGNED
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(place,)] = _ALIGNED
    return types, constants, attributes


def identity(launch: Launch) -> str:
    """Returns a text that is equal for launches of one compiled kernel."""
    return repr((launch.kernel.__name__, *signature(launch), launch.num_warps, launch.num_stages))


@contextlib.contextmanager
def _fresh() -> Iterator[io.StringIO]:
    """Compiles everything inside anew, and collects what the assembler says."""
    from triton import knobs

    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        before = knobs.cache.dir, knobs.nvidia.dump_ptxas_log
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = folder, True
        try:
            yield said
        finally:
            knobs.cache.dir, knobs.nvidia.dump_ptxas_log = before


def compiled(launch: Launch, target: Target) -> Resources:
    """Returns what the kernel of a launch takes on a target; raises what its compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants, attributes = signature(launch)
    source = ASTSource(launch.kernel, signature=types, constexprs=constants, attrs=attributes)
    arch = target.name if target.amd else int(target.name.removeprefix("sm_"))
    place = GPUTarget("hip" if target.amd else "cuda", arch, target.warp)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    with _fresh() as said:
        made = triton.compile(source, target=place, options=options)
    if target.amd:
        registers, spills, core = _amd(made.asm["amdgcn"])
    else:
        registers, spills, core = _nvidia(said.getvalue(), made.asm["ptx"])
    return Resources(
        kernel=launch.kernel.__name__.strip("_"),
        target=target.name,
        registers=registers,
        spill_bytes=spills,
        shared_bytes=made.metadata.shared,
        num_warps=made.metadata.num_warps,
        num_stages=launch.num_stages,
        tensor_core=core,
    )


def _nvidia(log: str, ptx: str) -> tuple[int, int, str]:
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None
    assert spills is not None
    names = {"tcgen05.mma": "tcgen05", "wgmma.mma_async": "wgmma", "mma.sync": "mma"}
    core = next((short for text, short in names.items() if text in ptx), "")
    return int(registers[1]), int(spills[1]), core


def _amd(text: str) -> tuple[int, int, str]:
    def count(name: str) -> int:
        found = re.search(rf"\.{name}:?\s+(\d+)", text)
        return int(found[1]) if found else 0

    core = "mfma" if "v_mfma" in text else ""
    return count("vgpr_count"), 4 * count("vgpr_spill_count"), core


def interpreting() -> bool:
    """Returns whether this process interprets kernels, and so cannot compile them."""
    return os.environ.get("TRITON_INTERPRET", "0") not in {"0", ""}
