"""FSDP2's insides that are relied on: this fails when an upgrade moves one of them."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest

from flopwright.executor.parallel.data_parallel import fsdp2_internals as internals

pytestmark = pytest.mark.slow  # importing FSDP2 takes seconds


def test_names_are_still_in_use() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state

    for names, module in (
        ((*internals.STATE_NAMES, internals.CONTEXT_NAME), _fsdp_state),
        (internals.GROUP_NAMES, _fsdp_param_group),
        (internals.PARAMETER_NAMES, _fsdp_param),
    ):
        source = inspect.getsource(module)
        for name in names:
            assert name in source, name


def test_every_private_name_used_is_listed() -> None:
    listed = {*internals.STATE_NAMES, internals.CONTEXT_NAME, "_get_fsdp_state",
              *internals.GROUP_NAMES, *internals.PARAMETER_NAMES}  # fmt: skip
    used = set()
    for function in (internals._state, internals._groups, internals.prepare, internals.reduce_now,
                     internals.sum_wide, internals._Sum.__call__):  # fmt: skip
        used.update(n for n in function.__code__.co_names if n.startswith("_"))
    assert used - {"_state", "_groups", "_parameter", "_Sum"} <= listed


def test_gradients_are_reduced_by_hand_as_torch_s_pipeline_stages_do() -> None:
    from torch.distributed.pipelining.stage import _PipelineStageBase

    source = inspect.getsource(_PipelineStageBase.perform_reduce_grad)
    for call in ("set_is_last_backward(True)", "set_requires_gradient_sync(True)",
                 "post_backward()", "_root_post_backward_final_callback()"):  # fmt: skip
        assert call in source, call
    assert version("torch").split("+")[0] == "2.13.0"
