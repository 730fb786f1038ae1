"""DeepSpeed's insides that are relied on: this fails when an upgrade moves one of them."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version

import pytest

from flopwright.executor.parallel.data_parallel import deepspeed_internals as internals

pytestmark = pytest.mark.slow  # importing DeepSpeed takes seconds


@pytest.fixture(scope="module")
def source() -> str:
    return inspect.getsource(internals.zero_optimizer_class())


def test_the_installed_version_is_the_pinned_one() -> None:
    assert version("deepspeed") == internals.PINNED_VERSION


def test_arguments_exist() -> None:
    accepted = inspect.signature(internals.zero_optimizer_class().__init__).parameters
    assert set(internals.ZERO_ARGUMENTS) <= set(accepted)


def test_every_argument_passed_is_listed() -> None:
    from flopwright.executor.parallel.data_parallel import deepspeed

    build = inspect.getsource(deepspeed.DeepSpeedZero._build)
    call = build[build.index("zero_optimizer_class()(") :]
    passed = re.findall(r"^            (\w+)=", call, flags=re.MULTILINE)
    assert sorted(passed) == sorted(internals.ZERO_ARGUMENTS)


def test_methods_exist() -> None:
    for name in internals.ZERO_METHODS:
        assert callable(getattr(internals.zero_optimizer_class(), name)), name


def test_attributes_are_set_by_its_constructor(source: str) -> None:
    for name in internals.ZERO_ATTRIBUTES:
        assert re.search(rf"self\.{name}\b *(:[^=\n]+)?=", source), name


def test_every_attribute_used_is_listed() -> None:
    from flopwright.executor.parallel.data_parallel import deepspeed

    text = inspect.getsource(deepspeed)
    used = set(re.findall(r"\bzero\.(\w+)", text)) | set(re.findall(r"self\._zero\.(\w+)", text))
    used -= {"optimizer", *internals.ZERO_METHODS}
    assert used == set(internals.ZERO_ATTRIBUTES)


def test_marks_and_timer_names_are_still_in_use(source: str) -> None:
    import deepspeed.utils.mixed_precision_linkage as linkage
    from deepspeed.moe import utils as moe_utils

    assert internals.ZERO_PADDING_MARK in source
    assert f"param.{internals.SUM_MARK}" in source
    assert internals.MASTER_MAP_MARK in inspect.getsource(linkage)
    marks = inspect.getsource(moe_utils)
    assert all(f".{mark}" in marks for mark in internals.EXPERT_MARKS)
    assert f"self.timers({internals.GATHER_TIMER}).start()" in source
    assert internals.gather_timer_name()


def test_stage_3_has_what_is_used_of_it() -> None:
    from flopwright.executor.parallel.data_parallel import deepspeed_stage3

    optimizer = internals.stage3_optimizer_class()
    accepted = inspect.signature(optimizer.__init__).parameters
    assert set(internals.STAGE3_ARGUMENTS) <= set(accepted)
    source = inspect.getsource(optimizer)
    for name in internals.STAGE3_METHODS:
        assert callable(getattr(optimizer, name)), name
    for name in internals.STAGE3_ATTRIBUTES:
        assert re.search(rf"self\.{name}\b *(:[^=\n]+)?=", source), name
    build = inspect.getsource(deepspeed_stage3.DeepSpeedZero3._build)
    call = build[build.index("stage3_optimizer_class()(") :]
    passed = re.findall(r"^            (\w+)=", call, flags=re.MULTILINE)
    assert sorted(passed) == sorted(internals.STAGE3_ARGUMENTS)
    text = inspect.getsource(deepspeed_stage3)
    used = set(re.findall(r"\bzero\.(\w+)", text)) | set(re.findall(r"self\._zero\.(\w+)", text))
    assert used - {"optimizer", *internals.STAGE3_METHODS} == set(internals.STAGE3_ATTRIBUTES)


def test_stage_3_manages_weights_as_expected() -> None:
    from deepspeed.runtime.zero import parameter_offload, partition_parameters

    manager = parameter_offload.DeepSpeedZeRoOffload
    assert callable(getattr(manager, internals.STAGE3_WEIGHTS_METHOD))
    accepted = inspect.signature(partition_parameters.Init.__init__).parameters
    assert {"module", "data_parallel_group", "dtype", "config_dict_or_path",
            "remote_device", "pin_memory"} <= set(accepted)  # fmt: skip


def test_the_jit_build_can_be_refused() -> None:
    import deepspeed.ops

    internals.disable_jit_builds()
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False


def test_the_muon_module_loads_without_compiling() -> None:
    from deepspeed.runtime import compiler

    before = compiler.compile
    internals.load_muon_uncompiled()
    assert compiler.compile is before
    from deepspeed.runtime.zero.muon import original_muon

    assert inspect.isfunction(original_muon.muon_update)
