"""Every private name inside torch's FSDP2 that this project touches, in one place.

FSDP2 reduces a module's gradients in its backward pass. Where the lowered list says when a
chunk's gradients are reduced (once a step, after the last of several backward passes that may
be split), they are reduced by hand, with the calls that torch's own pipeline stages make
(torch/distributed/pipelining/stage.py, `perform_reduce_grad`). torch is pinned exactly
(pyproject.toml); tests/unit/executor/parallel checks these names against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.distributed.fsdp import FSDPModule

# Of the state of a module that was sharded, and of the one at the root.
STATE_NAMES: Final = (
    "_fsdp_param_groups",
    "_state_ctx",
    "_lazy_init",
    "_root_post_backward_final_callback",
)
CONTEXT_NAME: Final = "all_states"
# Of a group of parameters that are gathered and reduced together, and of one of them.
GROUP_NAMES: Final = ("fsdp_params", "post_backward")
PARAMETER_NAMES: Final = (
    "sharded_param",
    "_unsharded_param",
    "unsharded_accumulated_grad",
    "reduce_dtype",
)


def _state(root: FSDPModule) -> Any:
    return root._get_fsdp_state()


def _groups(root: FSDPModule) -> Iterator[Any]:
    for state in _state(root)._state_ctx.all_states:
        yield from state._fsdp_param_groups


def prepare(root: FSDPModule) -> None:
    """Makes `root` the root of the modules in it, which its first forward would do."""
    _state(root)._lazy_init()


def reduce_now(root: FSDPModule) -> None:
    """Reduces the gradients that stand whole at the parameters of `root` and the modules in it."""
    root.set_is_last_backward(True)
    root.set_requires_gradient_sync(True)
    for group in _groups(root):
        group.post_backward()
    _state(root)._root_post_backward_final_callback()
    root.set_is_last_backward(False)
    root.set_requires_gradient_sync(False)


def sum_wide(root: FSDPModule) -> None:
    """Sums each backward pass's gradients in the dtype they are reduced in, as they are made.

    FSDP2 does so where a module's backward pass has ended, but weights' gradients of a split
    backward pass come later. Call it once the weights have been gathered.
    """
    for group in _groups(root):
        for parameter in group.fsdp_params:
            if parameter.reduce_dtype is not None:
                parameter._unsharded_param.register_post_accumulate_grad_hook(_Sum(parameter))


class _Sum:
    """Adds a gradient to the sum that FSDP2 reduces, and drops it."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    def __call__(self, unsharded: torch.Tensor) -> None:
        if unsharded.grad is None:  # put off: the second half of a split backward makes it
            return
        total = self._parameter.unsharded_accumulated_grad
        if total is None:
            wide = unsharded.grad.to(self._parameter.reduce_dtype)
            self._parameter.unsharded_accumulated_grad = wide
        else:
            total.add_(unsharded.grad)
        unsharded.grad = None
