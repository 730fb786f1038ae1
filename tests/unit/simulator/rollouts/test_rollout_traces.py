"""Lengths read from traces, histograms and logs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flopwright.errors import InputError
from flopwright.simulator.rollouts.closed_forms import mean_length
from flopwright.simulator.rollouts.lengths import LengthStream, clip_share, log_median, survival
from flopwright.simulator.rollouts.traces import MOST_VALUES, empirical_lengths
from flopwright.spec.rollout import EmpiricalLengths, LognormalLengths


def test_a_histogram_keeps_its_mean_and_its_tail(measured_data):
    law = empirical_lengths(measured_data / "traces" / "servegen_deepseek_r1_output_len_pmf.csv")
    assert len(law.values) <= MOST_VALUES
    assert mean_length(law) == pytest.approx(1527, rel=0.02)
    drawn = LengthStream(law, 0).draw(200_000)
    assert np.median(drawn) == pytest.approx(792, rel=0.03)
    assert np.quantile(drawn, 0.99) == pytest.approx(12_607, rel=0.05)


def test_a_trace_of_requests_keeps_its_mean_and_its_tail(measured_data):
    path = measured_data / "traces" / "mooncake_conversation_lengths.csv"
    law = empirical_lengths(path)
    assert len(law.values) <= MOST_VALUES
    assert mean_length(law) == pytest.approx(343, abs=1)
    assert float(survival(law)(np.array([1119.0]))[0]) == pytest.approx(0.01, abs=0.003)
    assert mean_length(empirical_lengths(path, "input_len")) == pytest.approx(12_035, rel=0.002)


def test_a_log_of_ones_own_run_and_a_cap(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"response_length": n}) + "\n" for n in (5, 5, 9, 40)))
    assert empirical_lengths(path) == EmpiricalLengths(values=(5, 5, 9, 40), weights=(1,) * 4)
    assert mean_length(empirical_lengths(path, cap=10)) == (5 + 5 + 9 + 10) / 4


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "t,len\n1,2\n", "no column of lengths"),
        ("a.csv", "output_len\n", "no rows"),
        ("a.csv", "output_len\nx\n", "must be a number"),
        ("a.csv", "output_len\n-3\n", "must be a number"),
        ("a.jsonl", '{"length": 1}\n{"length"\n', "is not JSON"),
    ],
)
def test_files_that_hold_no_lengths_are_refused_with_their_line(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        empirical_lengths(path)
    with pytest.raises(InputError, match="cannot be read"):
        empirical_lengths(tmp_path / "nowhere.csv")


def test_unknown_columns_are_met_with_the_nearest(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("output_len\n3\n")
    with pytest.raises(InputError, match="did you mean 'output_len'"):
        empirical_lengths(path, "output_length")


@pytest.mark.parametrize(("sigma", "share"), [(0.6, 0.020), (0.8, 0.048), (1.0, 0.078)])
def test_the_location_is_solved_for_the_mean_after_the_cap(sigma, share):
    """Seer's Moonlight: mean 22,386, cap 65,536; the clip shares derived in the public notes."""
    law = LognormalLengths(mean=22_386, sigma=sigma, cap=65_536, mean_of="clipped")
    assert mean_length(law) == pytest.approx(22_386, rel=1e-3)
    assert LengthStream(law, 0).draw(400_000).mean() == pytest.approx(22_386, rel=0.005)
    assert clip_share(law) == pytest.approx(share, abs=0.001)
    plain = LognormalLengths(mean=22_386, sigma=sigma, cap=65_536)
    assert log_median(law) > log_median(plain)
    assert mean_length(plain) < 22_386
