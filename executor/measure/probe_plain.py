"""Probe cases that belong to no layer: copies, to the host and back, narrowing to FP8."""

from __future__ import annotations

import torch

from flopwright.executor.measure.probe_cases import TORCH_DTYPES, Prepared, ProbeCase
from flopwright.kernels.fp8_quantize.cost import quantize as quantize_cost
from flopwright.kernels.fp8_quantize.op import quantize
from flopwright.ops import CostBuilder, OpKind, OpTable, Phase


def copy_case(nbytes: int) -> ProbeCase:
    """Returns a plain copy of `nbytes` bytes: the memory's own bandwidth."""
    elements = max(1, nbytes // 4)

    def prepare(device: torch.device) -> Prepared:
        source = torch.ones(elements, device=device)
        target = torch.empty_like(source)
        return Prepared(lambda: target.copy_(source))

    return ProbeCase("copy", "fp32", _copied("copy", elements), prepare)


def host_copy_case(nbytes: int, *, back: bool) -> ProbeCase:
    """Returns a copy between a GPU and its host's pinned memory, to the host or back."""
    elements = max(1, nbytes // 4)
    name = "from_host" if back else "to_host"

    def prepare(device: torch.device) -> Prepared:
        host = torch.ones(elements, pin_memory=True)
        here = torch.ones(elements, device=device)
        target, source = (here, host) if back else (host, here)
        return Prepared(lambda: target.copy_(source, non_blocking=True))

    return ProbeCase(name, "fp32", _copied(name, elements), prepare)


def _copied(name: str, elements: int) -> OpTable:
    cost = CostBuilder()
    cost.op(
        name, OpKind.MEMORY_BOUND, Phase.FORWARD, dtype="fp32", m=elements,
        read_bytes=4 * elements, written_bytes=4 * elements,
    )  # fmt: skip
    return cost.build().ops


def quantize_case(rows: int, width: int, dtype: str) -> ProbeCase:
    """Returns one pass from `dtype` to FP8 with a scale for each 1 x 128 tile."""

    def prepare(device: torch.device) -> Prepared:
        x = torch.ones(rows, width, device=device, dtype=TORCH_DTYPES[dtype])
        return Prepared(lambda: quantize(x)[0])

    cost = CostBuilder()
    quantize_cost(cost, "quantize", Phase.FORWARD, rows=rows, width=width, dtype=dtype)
    return ProbeCase("quantize", dtype, cost.build().ops, prepare, essential=False)
