"""A world of any size with one rank in it: torch's fake process group and fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def _real_meshes() -> Iterator[None]:
    """Device meshes are made of ranks, which have values in a dry run too."""
    made = DeviceMesh.from_group

    def from_group(*args: Any, **options: Any) -> DeviceMesh:
        with _disable_current_modes():
            return made(*args, **options)

    DeviceMesh.from_group = from_group  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceMesh.from_group = made  # type: ignore[method-assign]


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[FakeTensorMode]:
    """Makes this process rank `rank` of `world_size`, whose collectives move nothing.

    Gives the mode that decides shapes; it is not entered yet.

    Args:
        rank: as plan/mesh.py numbers them.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries ask fake tensors for their addresses
            with _real_meshes():
                yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        dist.destroy_process_group()
