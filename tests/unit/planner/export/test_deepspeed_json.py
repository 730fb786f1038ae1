"""DeepSpeed's own parser takes the exported file, for the world size that the plan is for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, KeysView
from typing import Any
from unittest import mock

import pytest

from flopwright.plan.file import PlanFile
from flopwright.planner.export.deepspeed_json import (
    KNOWN_KEYS,
    deepspeed_config,
    deepspeed_json,
    not_expressed,
    unknown_keys,
)

PLANS: list[dict[str, Any]] = [
    {"dp_shard": 1024},
    {"dp_shard": 2048, "zero_stage": 1, "ep": 8},
    {"dp_shard": 2048, "zero_stage": 2},
    {"dp_shard": 2048, "zero_stage": 3, "recompute": "full", "activation_offload": True},
    {"pp": 16, "ep": 16, "dp_shard": 128, "zero_stage": 1, "optimizer_offload": True},
    {"pp": 4, "tp": 8, "dp_shard": 64, "zero_stage": 1, "micro_batch_size": 2},
    {"dp_shard": 256, "cp": 8, "zero_stage": 1},
    {"pp": 2, "vpp": 4, "schedule": "interleaved_1f1b", "dp_shard": 512},
]


@pytest.fixture(scope="module")
def parse() -> Iterator[Callable[[dict[str, Any], PlanFile], Any]]:
    """DeepSpeed's parser, told the plan's world size instead of the present one."""
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):
        pytest.importorskip("deepspeed")
        from deepspeed.runtime.config import DeepSpeedConfig

        def run(config: dict[str, Any], plan: PlanFile) -> Any:
            groups = None  # DeepSpeed knows dp and sequence parallelism itself
            if plan.parallel.tp * plan.parallel.pp > 1:
                groups = mock.Mock(spec=["get_data_parallel_world_size"])
                groups.get_data_parallel_world_size.return_value = plan.parallel.dp
            with (
                mock.patch("deepspeed.comm.get_rank", return_value=0),
                mock.patch("deepspeed.comm.get_world_size", return_value=plan.parallel.world_size),
            ):
                return DeepSpeedConfig(config, mpu=groups)

        yield run


@pytest.mark.parametrize("axes", PLANS, ids=lambda a: "-".join(f"{k}{v}" for k, v in a.items()))
def test_deepspeed_takes_the_file(
    axes: dict[str, Any], make: Callable[..., PlanFile], parse: Callable[..., Any]
) -> None:
    plan = make(**axes)
    parsed = parse(json.loads(deepspeed_json(plan)), plan)
    workload = plan.scenario.workload
    assert parsed.train_batch_size == workload.global_batch_size
    assert parsed.train_micro_batch_size_per_gpu == plan.parallel.micro_batch_size
    assert parsed.gradient_accumulation_steps == 16384 // (
        plan.parallel.micro_batch_size * plan.parallel.dp
    )
    assert parsed.zero_optimization_stage == plan.parallel.zero_stage
    assert parsed.bfloat16_config.enabled
    assert parsed.gradient_clipping == workload.optimizer.gradient_clip
    assert parsed.grad_accum_dtype == "fp32"
    offload = parsed.zero_config.offload_optimizer
    assert (offload is not None and offload.device == "cpu") == plan.parallel.optimizer_offload


def test_the_parser_judges_the_target_world_size(
    make: Callable[..., PlanFile], parse: Callable[..., Any]
) -> None:
    plan = make(dp_shard=1024)
    config = deepspeed_config(plan)
    with pytest.raises(AssertionError, match="train_batch_size is not equal"):
        parse(config | {"gradient_accumulation_steps": 17}, plan)
    with pytest.raises(ValueError, match="stage"):
        parse(config | {"zero_optimization": {"stage": 9}}, plan)


class Asked(dict[str, Any]):
    """A dictionary that notes which keys are asked for."""

    def __init__(self, data: dict[str, Any], asked: set[str]) -> None:
        super().__init__(data)
        self.asked = asked

    def __copy__(self) -> Asked:
        return Asked(self, self.asked)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return KeysView(self)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def test_known_keys_are_keys_that_deepspeed_reads(
    make: Callable[..., PlanFile], parse: Callable[..., Any]
) -> None:
    plan, asked = make(dp_shard=1024), set[str]()
    parse(Asked(deepspeed_config(plan), asked), plan)
    assert asked >= KNOWN_KEYS, KNOWN_KEYS - asked


def test_unknown_keys_are_found_with_a_hint(k2: PlanFile) -> None:
    assert not unknown_keys(deepspeed_config(k2))
    (found,) = unknown_keys(deepspeed_config(k2) | {"gradient_cliping": 1.0})
    assert found.field == "gradient_cliping"
    assert "gradient_clipping" in found.nearest_fix


def test_what_the_file_cannot_say_is_listed(make: Callable[..., PlanFile]) -> None:
    plan = make(
        pp=16,
        ep=16,
        dp_replicate=2,
        dp_shard=64,
        zero_stage=1,
        recompute="selective",
        fp8_activations=True,
        activation_offload=True,
    )
    text = "\n".join(not_expressed(plan))
    for word in ("muon", "pp 16", "ep 16", "dp_replicate 2", "selective", "FP8", "offload"):
        assert word in text
    plain = "\n".join(not_expressed(make(dp_shard=1024, zero_stage=1)))
    for word in ("pp ", "ep ", "dp_replicate", "recompute", "FP8", "offload"):
        assert word not in plain
