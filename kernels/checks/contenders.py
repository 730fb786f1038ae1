"""What a contest of kernels is made of: a case, its contenders, tensors for it.

Which kernel our op runs is set by the environment variable of `dispatch` for the time of the
call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from flopwright.kernels.dispatch import VARIABLE
from flopwright.kernels.libraries import missing
from flopwright.ops import CostBuilder, OpTable, Phase

Run = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape.

    Attributes:
        contenders: name -> function of `inputs` that returns what gradients flow back from.
        inputs: leaves; those that require a gradient get one in the backward pass.
        rows: what cost.py says of it, for the floor; None where there is no row.
        differentiable: whether there is a backward pass to time.
    """

    op: str
    shape: str
    contenders: dict[str, Run]
    inputs: tuple[Tensor, ...]
    rows: OpTable | None
    differentiable: bool = True

    def work(self, backward: bool) -> tuple[float, float]:
        """Returns (FLOPs, bytes moved) of the forward pass, or of the passes back."""
        if self.rows is None:
            return 0.0, 0.0
        chosen = (self.rows.phase != Phase.FORWARD) == backward
        moved = self.rows.read_bytes + self.rows.written_bytes
        return float(self.rows.flops[chosen].sum()), float(moved[chosen].sum())


@contextmanager
def running(op: str, kernel: str) -> Iterator[None]:
    """Makes an op, or several named in one text, run a kernel inside."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ",".join(f"{name}={kernel}" for name in op.split())
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@dataclass(frozen=True, slots=True)
class Ours:
    """A function whose op runs a given kernel, forward and, inside `chosen`, backward."""

    op: str
    kernel: str
    run: Run

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Returns the function's result."""
        with running(self.op, self.kernel):
            return self.run(*inputs)


def chosen(run: Run) -> AbstractContextManager[None]:
    """Returns what a contender's backward pass has to run inside."""
    return running(run.op, run.kernel) if isinstance(run, Ours) else nullcontext()


def running_with(op: str, kernel: str, run: Run) -> Ours:
    """Returns the function with the op's kernel chosen."""
    return Ours(op, kernel, run)


def rows_of(add: Callable[[CostBuilder], None]) -> OpTable:
    """Returns the rows that a cost function adds."""
    cost = CostBuilder()
    add(cost)
    return cost.build().ops


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes tensors on a device; `scale` divides the sizes for a trial run."""

    device: torch.device
    dtype: torch.dtype
    scale: int = 1

    def size(self, n: int, least: int = 8) -> int:
        """Returns a size, smaller in a trial."""
        return max(least, n // self.scale)

    def leaf(self, *shape: int, grad: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a leaf of normal numbers."""
        made = torch.randn(*shape, device=self.device, dtype=torch.float32)
        return made.to(dtype or self.dtype).requires_grad_(grad)

    def library(self, op: str) -> bool:
        """Returns whether a library's kernel of an op runs here."""
        return self.device.type == "cuda" and not missing(op)

    @property
    def name(self) -> str:
        """The dtype as cost.py calls it."""
        return {torch.bfloat16: "bf16", torch.float32: "fp32"}[self.dtype]
