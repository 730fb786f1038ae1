"""The search's bounds: fields that came later leave old files and their hashes as they were."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from flopwright.spec.load import load_scenario
from flopwright.spec.scenario import SearchSpace

OLD = {
    "tp": [],
    "pp": [],
    "ep": [],
    "vpp": [],
    "zero_stage": [0, 1],
    "micro_batch_size": [],
    "recompute": ["none", "selective", "full"],
    "memory_headroom": 0.05,
}


def test_the_default_is_written_as_before_there_were_more_fields() -> None:
    assert SearchSpace().to_data() == OLD
    assert "stack" not in load_scenario("kimi_k2_mini_2cpu_fp32").to_data()


def test_later_fields_are_written_where_they_say_something() -> None:
    space = SearchSpace(schedule=("1f1b",), recompute_tags=(), gemm=("fp8_block",))
    data = space.to_data()
    assert data == {**OLD, "schedule": ["1f1b"], "recompute_tags": [], "gemm": ["fp8_block"]}
    assert SearchSpace.model_validate(data) == space
    assert space.content_hash() != SearchSpace().content_hash()


@pytest.mark.parametrize(
    "bad",
    [
        {"schedule": ("2f2b",)},
        {"gemm": ("fp9",)},
        {"cp": (0,)},
        {"recompute_layers": (0,)},
        {"context_parallel": ("star",)},
    ],
)
def test_values_that_are_none_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SearchSpace.model_validate(bad)
