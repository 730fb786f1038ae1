"""Cells of the value column."""

from __future__ import annotations

import pytest

from flopwright.simulator.accuracy.rl.values import Value, parse_value


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("3910", "s", (3910.0,)),
        ("0.12", "s", (0.12,)),
        ("<30", "s", (30.0,)),
        ("~7", "s", (7.0,)),
        ("33.6", "h", (33.6 * 3600,)),
        ("84", "%", (0.84,)),
        ("128.7", "k tokens/s", (128_700.0,)),
        ("133", "ms", (0.133,)),
        ("53 -> 7.2", "s", (53.0, 7.2)),
        ("2.03/2.22/2.56", "x", (2.03, 2.22, 2.56)),
        ("3480 est -> 270", "s", (3480.0, 270.0)),
        ("rank0 73.1 s (28013 tok, max 3768); rank4 118.6 s (4, 5)", "s", (73.1, 118.6)),
        ("fast", "s", ()),
    ],
)
def test_a_cell_is_read_in_si(text: str, unit: str, expected: tuple[float, ...]) -> None:
    assert tuple(v.middle for v in parse_value(text, unit)) == pytest.approx(expected)


def test_a_range_is_hit_inside_and_missed_from_its_nearer_end() -> None:
    (value,) = parse_value("3.9-4.9", "s")
    assert value == Value(3.9, 4.9)
    assert value.error(4.2) == 0.0
    assert value.error(3.0) == pytest.approx(3.0 / 3.9 - 1)
    assert value.error(9.8) == pytest.approx(1.0)
    assert Value(2.0, 2.0).error(1.0) == -0.5
