"""Linear attention as a probe runs it: the delta rule at a shape, priced by its cost.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flopwright.executor.measure.probe_cases import TORCH_DTYPES, Prepared, ProbeCase
from flopwright.kernels.kda.cost import kda as kda_cost
from flopwright.kernels.kda.op import kda
from flopwright.kernels.linear.reference import wide_dtype
from flopwright.ops import CostBuilder

KERNEL = "kda"  # of its rows


def kda_case(
    sequences: int, seq_len: int, heads: int, width: int, dtype: str, *, essential: bool = True
) -> ProbeCase:
    """Returns Kimi Delta Attention with its backward, keys and values `width` wide."""

    def prepare(device: torch.device) -> Prepared:
        narrow = TORCH_DTYPES[dtype]
        made = torch.Generator(device="cpu").manual_seed(0)

        def random(*more: int) -> torch.Tensor:
            return torch.randn(sequences, seq_len, heads, *more, generator=made)

        q, k, v = (random(width) for _ in range(3))
        tensors = [q, F.normalize(k, dim=-1), v]
        given = [t.to(device, narrow).requires_grad_() for t in tensors]
        rates = [-random(width).sigmoid(), random().sigmoid()]
        given += [t.to(device, wide_dtype(narrow)).requires_grad_() for t in rates]
        return Prepared(lambda: kda(*given, width**-0.5)[0], tuple(given))

    cost = CostBuilder()
    kda_cost(
        cost, "kda", sequences=sequences, seq_len=seq_len, heads=heads, k_width=width,
        v_width=width, dtype=dtype,
    )  # fmt: skip
    return ProbeCase("kda", dtype, cost.build().ops, prepare, essential)
