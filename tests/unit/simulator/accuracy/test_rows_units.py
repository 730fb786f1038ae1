"""Numbers, units and metrics as other tables write them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from flopwright.errors import InputError
from flopwright.simulator.accuracy.rows import read_configurations
from flopwright.simulator.accuracy.rows_units import in_si, metric_name, positive


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", 1234.0), ("~4.2", 4.2), ("≈ 12", 12.0), ("12.3±0.4", 12.3), ("3 +/- 1", 3.0),
        ("1.2e3", 1200.0), ("43%", 43.0), ("3.2 (mean)", 3.2), ("12 345", 12345.0), (".5", 0.5),
        ("5.", 5.0), ("4.1-4.3", None), ("4.1–4.3", None), (">300", None), ("<5", None),
        ("-4", None), ("0", None), ("0.0", None), ("nan", None), ("inf", None), ("1e400", None),
        ("12.5k", None), ("0x10", None), ("1.2.3", None), ("", None), ("abc", None),
    ],
)  # fmt: skip
def test_numbers(text: str, value: float | None) -> None:
    assert positive(text) == value


# 2 of a unit, in seconds, tokens or sequences a second, bytes.
@pytest.mark.parametrize(
    ("metric", "unit", "name", "value"),
    [
        ("step_time", "ms", "step_time", 0.002),
        ("step_time", "min", "step_time", 120.0),
        ("step_time", "h", "step_time", 7200.0),
        ("iteration time", "sec/iter", "step_time", 2.0),
        ("time_per_step", "", "step_time", 2.0),
        ("step_time_ms", "", "step_time", 0.002),
        ("step_time", "it/s", "step_time", 0.5),
        ("tokens_per_s", "tok/s", "tokens_per_s", 2.0),
        ("tokens_per_second", "k tokens/s", "tokens_per_s", 2000.0),
        ("tokens_per_s", "B tokens/day", "tokens_per_s", 2e9 / 86400),
        ("tokens_per_s", "tokens/s/GPU", "tokens_per_s_per_gpu", 2.0),
        ("tokens/sec/device", "", "tokens_per_s_per_gpu", 2.0),
        ("TGS", "", "tokens_per_s_per_gpu", 2.0),
        ("tokens_per_s_per_gpu", "tokens per second per GPU", "tokens_per_s_per_gpu", 2.0),
        ("throughput", "samples/s", "samples_per_s", 2.0),
        ("samples_per_s", "sequences/s/GPU", "samples_per_s_per_gpu", 2.0),
        ("peak_mem_gb", "GiB", "peak_mem_gb", 2.0**31),
        ("peak_memory_gb", "", "peak_mem_gb", 2e9),
        ("mfu", "%", "mfu", 2.0),
    ],
)
def test_units(metric: str, unit: str, name: str, value: float) -> None:
    found = in_si(metric_name(metric), 2.0, unit)
    assert found is not None
    assert found == (name, pytest.approx(value))


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        ("step_time", "tokens/s"), ("step_time", "furlongs"), ("step_time", "s/token"),
        ("tokens_per_s", "samples/s"), ("tokens_per_s", "s"), ("tokens_per_s", "tokens/s/node"),
        ("samples_per_s", "tokens/s"), ("peak_mem_gb", "%"), ("tokens_per_s", "tokens"),
    ],
)  # fmt: skip
def test_a_unit_of_something_else_is_never_read(metric: str, unit: str) -> None:
    assert in_si(metric, 2.0, unit) is None


def test_every_unread_row_says_why(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "metric", "value", "unit"])
        writer.writerow(["a", "step_time", "18-22", "s"])
        writer.writerow(["b", "step_time", "-3", "s"])
        writer.writerow(["c", "step_time", "3", "furlongs"])
        writer.writerow(["d", "", "3", "s"])
        writer.writerow([])
        writer.writerow(["", "", "", ""])
        writer.writerow(["e", "step_time", "3", "s", "and", "more"])
        writer.writerow(["f", "step_time", "3", "s"])
    found, skipped = read_configurations(path)
    assert [c.id for c in found] == ["f"]
    reasons = dict(skipped)
    assert "no positive number: '18-22'" in reasons["a"]
    assert "'-3'" in reasons["b"]
    assert "furlongs" in reasons["c"]
    assert "no metric" in reasons["d"]
    assert "more cells" in reasons["e"]
    assert len(skipped) == 6


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiters_and_a_byte_order_mark(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "rows.csv"
    head, row = ["ID", " Metric ", "value"], ["a", "step_time", "3"]
    text = "\n".join(delimiter.join(line) for line in (head, row))
    path.write_text("\ufeff" + text + "\n", encoding="utf-8")
    found, skipped = read_configurations(path)
    assert not skipped
    assert found[0].value("step_time") == 3.0


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", bytes(range(256)) * 8, b"\0" * 300])
def test_no_file_is_another_exception_than_an_input_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(InputError):
        read_configurations(path)
    with pytest.raises(InputError):
        read_configurations(tmp_path)
