"""Quantities: what is written reads back, what has two readings is refused with both."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwright import units

WHOLE_BYTES = st.integers(0, 2**62)
POSITIVE = st.floats(1e-12, 1e18, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("80 GiB", "bytes", 80 * 2**30),
        ("2 TB", "bytes", 2e12),
        ("450 GB/s", "bytes_per_s", 450e9),
        ("400 Gbit/s", "bytes_per_s", 50e9),
        ("989 TFLOP/s", "flops_per_s", 989e12),
        ("3.03e24 FLOP", "flops", 3.03e24),
        ("10 us", "seconds", 1e-5),
        ("2.5 h", "seconds", 9000),
        ("15.5T", "tokens", 15.5e12),
        (4096, "tokens", 4096),
        ("163_840", "tokens", 163840),
        ("2.0 USD/h", "usd_per_hour", 2.0),
    ],
)
def test_reads_quantities_in_si(text: object, dimension: str, value: float) -> None:
    assert units.parse_quantity(text, dimension) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "dimension", "readings"),
    [
        ("400 Gb/s", "bytes_per_s", ("GB/s", "Gbit/s")),
        ("400 Gbps", "bytes_per_s", ("GB/s", "Gbit/s")),
        ("989 TFLOPS", "flops_per_s", ("TFLOP/s", "TFLOP'")),
        ("80 Gb", "bytes", ("GB'", "Gbit'")),
    ],
)
def test_refuses_two_readings_and_names_both(
    text: str, dimension: str, readings: tuple[str, str]
) -> None:
    with pytest.raises(ValueError, match="both ways") as caught:
        units.parse_quantity(text, dimension)
    assert all(r in str(caught.value) for r in readings)


def test_refuses_decimal_gb_of_gpu_memory_and_says_why() -> None:
    with pytest.raises(ValueError, match=r"80 GB = 74\.5 GiB"):
        units.parse_quantity("80 GB", "bytes", hbm=True)


@pytest.mark.parametrize(
    "text", ["80", 80, "GiB", "", "80 GiB extra", "-1 GiB", "nan GiB", None, True, [1]]
)
def test_refuses_what_is_no_quantity(text: object) -> None:
    with pytest.raises(ValueError, match=r"write it like|expected a quantity|finite"):
        units.parse_quantity(text, "bytes")


@given(WHOLE_BYTES)
def test_bytes_read_back_exactly(value: int) -> None:
    assert round(units.parse_quantity(units.format_bytes(value), "bytes")) == pytest.approx(
        value, rel=1e-15
    )


@given(POSITIVE)
def test_rates_and_seconds_read_back(value: float) -> None:
    for show, dimension in (
        (units.format_bytes_per_s, "bytes_per_s"),
        (units.format_flops_per_s, "flops_per_s"),
        (units.format_seconds, "seconds"),
    ):
        assert math.isclose(units.parse_quantity(show(value), dimension), value, rel_tol=1e-14)
