"""A diverged run's losses survive JSON, and JSON stays JSON."""

from __future__ import annotations

import json
import math

from pydantic import TypeAdapter

from flopwright.report.metrics import Loss


def test_losses_that_are_no_numbers_are_null_in_json_and_come_back() -> None:
    adapter = TypeAdapter(tuple[Loss, ...])
    text = json.dumps(adapter.dump_python((1.5, math.nan, math.inf), mode="json"), allow_nan=False)
    assert text == "[1.5, null, null]"
    back = adapter.validate_json(text)
    assert back[0] == 1.5
    assert all(math.isnan(v) for v in back[1:])
