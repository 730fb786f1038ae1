"""Stacks from levels: what is known, what stands in for what is not, and what may be a level."""

from __future__ import annotations

import math

import pytest

from flopwright.simulator.accuracy.fit_levels import linked, unlinked
from flopwright.simulator.accuracy.fit_stacks import (
    UNSEEN,
    StackLevels,
    interval80,
    shipped_levels,
    shipped_traits,
    stack_calibration,
    traits_of,
    unit_calibration,
)
from flopwright.simulator.accuracy.fit_step import SLOT, SLOTS
from flopwright.simulator.accuracy.fit_terms import TERMS, base_scalars, fit_labels
from flopwright.simulator.accuracy.stack_of_row import StackKey
from flopwright.spec.load import MODEL_CATALOG, load_gpu

BRIDGE = StackKey("megatron_bridge", "25.11", "dense")


def levels(**terms: dict[str, float]) -> StackLevels:
    return StackLevels(
        id="t",
        created="2026-01-01",
        source="t",
        residual_log=0.05,
        terms={name.replace("_", " "): values for name, values in terms.items()},
        spread_log={BRIDGE.label(): 0.07, UNSEEN: 0.2},
    )


def test_terms_of_a_scalar_multiply() -> None:
    gpu = load_gpu("h100_sxm")
    known = levels(
        kernel_gemm={"all": math.log(0.9)},
        processor={"h100_sxm": math.log(1.1), "b200": 5.0},
        stack={BRIDGE.label(): math.log(1.2)},
        recipe={"hopper-fp8_block": math.log(2.0)},
    )
    found = stack_calibration(BRIDGE, gpu, levels=known)
    assert found.kernel_factors["gemm"] == pytest.approx(0.9 * 1.1 * 1.2)
    assert found.kernel_factors["attention"] == pytest.approx(1.1 * 1.2)
    narrow = stack_calibration(BRIDGE, gpu, "fp8_block", known)
    assert narrow.kernel_factors["gemm"] == pytest.approx(0.9 * 1.1 * 1.2 * 2)
    assert narrow.kernel_factors["attention"] == pytest.approx(1.1 * 1.2)
    assert found.step_residual_log == pytest.approx(0.07)


def test_a_stack_never_seen_gets_its_familys_scalars_and_a_wider_interval() -> None:
    gpu = load_gpu("h100_sxm")
    known = levels(
        stack={BRIDGE.label(): 0.5}, family={"dense": math.log(1.1)}, framework={"x-dense": 0.3}
    )
    found = stack_calibration(StackKey("nobodys", "2031", "dense"), gpu, levels=known)
    assert found.kernel_factors["gemm"] == pytest.approx(1.1)
    assert found.step_residual_log == pytest.approx(0.2)
    low, high = interval80(10.0, 0.2)
    assert (low, high) == pytest.approx((10 / math.exp(0.2563), 10 * math.exp(0.2563)), rel=1e-3)


def test_links_and_their_inverse() -> None:
    raw = base_scalars()
    assert unlinked(linked(raw)) == pytest.approx(raw)
    values = linked(raw)
    assert 0 < values[SLOT["hide tp_comm"]] < 1
    assert values[SLOT["x gemm"]] == 1.0


def test_the_unit_calibration_scales_nothing() -> None:
    found = unit_calibration(BRIDGE, load_gpu("h100_sxm"))
    assert not found.kernel_factors
    assert not found.hidden_share
    assert not found.layer_host_s
    assert found.step_constant_s == 0.0
    assert found.curves


def test_traits_follow_era_then_framework_then_any() -> None:
    assert traits_of(StackKey("megatron", "unfused", "dense")).attention_kernel == "unfused"
    assert traits_of(StackKey("megatron", "fused", "dense")).pad_vocab_to == 128
    assert traits_of(StackKey("nobodys", "2031", "moe")) == shipped_traits()["other"]


def test_no_committed_scalar_belongs_to_a_row_or_a_model() -> None:
    found = shipped_levels()
    models = {path.stem.replace("_", "") for path in MODEL_CATALOG.glob("*.yaml")}
    levels_known = {term.level for term in TERMS}
    assert set(found.terms) <= levels_known
    for labels in found.terms.values():
        for label in labels:
            assert not any(model in label.replace("_", "") for model in models), label
    assert found.free_parameters() == sum(found.by_level().values())


def test_committed_scalars_are_those_of_a_machine() -> None:
    found = shipped_levels()
    for gpu in ("a100_sxm_80gb", "h100_sxm", "b200"):
        calibration = stack_calibration(BRIDGE, load_gpu(gpu), levels=found)
        assert all(0.3 < f < 3 for f in calibration.kernel_factors.values())
        assert all(0.2 < f < 6 for f in calibration.factors.values())
        assert all(0 <= h <= 1 for h in calibration.hidden_share.values())
        assert 1e-4 < calibration.layer_host_s["dense"] < 1e-2
        assert 0 < calibration.step_constant_s < 0.5
    assert 0.1 < found.spread_log[UNSEEN] < 0.4


def test_every_scalar_is_in_a_term_or_fixed_on_purpose() -> None:
    fixed = {"x optimizer", "x offload", "hide cp_comm"}
    used = {slot for term in TERMS for slot in term.slots}
    assert used <= set(SLOTS)
    assert set(SLOTS) - used == fixed


def test_labels_of_a_stack() -> None:
    labels = fit_labels(BRIDGE, load_gpu("b200"), "mxfp8")
    assert labels["recipe"] == "blackwell-mxfp8"
    assert labels["stack_gpu"] == "megatron_bridge-25.11-dense+b200"
    assert fit_labels(BRIDGE, load_gpu("h100_sxm"), "same")["recipe"] == ""
