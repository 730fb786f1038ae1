"""Calibrations by the name of a software stack, and back from their ids."""

from __future__ import annotations

import pytest

from flopwright.errors import InputError
from flopwright.simulator.accuracy.named_stacks import (
    DEFAULT_STACK,
    calibration_by_name,
    scenario_calibration,
    stack_names,
)
from flopwright.spec.load import load_scenario

K2 = "kimi_k2_pretrain_2048gpu_h800_bf16"


@pytest.mark.slow
@pytest.mark.parametrize("stack", stack_names())
def test_the_id_of_a_stack_on_a_prior_finds_it_again(stack: str) -> None:
    scenario = load_scenario(K2)
    known = scenario_calibration(scenario, stack)
    assert calibration_by_name(scenario, known.id) == known


@pytest.mark.slow
def test_an_id_of_another_processor_is_refused() -> None:
    scenario = load_scenario(K2)
    with pytest.raises(InputError, match="nor the id of a calibration"):
        calibration_by_name(scenario, "prior-a100_sxm_80gb+megatron_bridge-25.11-moe")


def test_a_scenario_is_priced_under_a_stack_on_gpus_and_by_the_prior_alone_on_cpus() -> None:
    k2 = load_scenario(K2)
    assert DEFAULT_STACK in scenario_calibration(k2.model_copy(update={"stack": ""})).id
    assert "+other" in scenario_calibration(k2).id
    assert scenario_calibration(load_scenario("kimi_k2_mini_2cpu_fp32")).id == "prior-cpu"


def test_an_unknown_stack_is_named_with_its_nearest() -> None:
    with pytest.raises(InputError, match="no such software stack"):
        scenario_calibration(load_scenario(K2), "megatron_bridge-25.12")
