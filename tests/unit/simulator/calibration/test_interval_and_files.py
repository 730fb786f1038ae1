from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from flopwright.errors import InputError
from flopwright.simulator.calibration.files import (
    default_calibration,
    load_calibration,
    save_calibration,
    shipped_calibration_ids,
)
from flopwright.simulator.calibration.identity import with_id
from flopwright.simulator.calibration.interval import (
    step_time_interval,
    step_time_log_std,
    student_t_quantile,
)
from flopwright.simulator.calibration.model import Calibration, CollectiveCurve, EfficiencyCurve
from flopwright.spec.load import load_cluster


def make_calibration(**changes: object) -> Calibration:
    values: dict[str, object] = {
        "id": "c",
        "created": "2026-01-02T03:04:05+00:00",
        "source": "made for a test",
        "curves": (
            EfficiencyCurve(
                kind="gemm", dtype="fp32", peak_flops_per_s=1e11, domain={"m": (1.0, 64.0)}
            ),
        ),
        "collectives": (
            CollectiveCurve(
                collective="all_reduce",
                link="loopback",
                ranks=2,
                alpha_s=1e-4,
                bytes_per_s=1e9,
                domain_bytes=(4096.0, 2.0**24),
            ),
        ),
    }
    return Calibration.model_validate(values | changes)


@pytest.mark.parametrize("dof", [2.0, 3.0, 4.5, 8.0, 30.0, 1e6])
def test_t_quantile_agrees_with_scipy(dof: float) -> None:
    for probability in (0.6, 0.8, 0.9):
        exact = scipy.stats.t.ppf(probability, dof)
        assert student_t_quantile(probability, dof) == pytest.approx(exact, rel=0.01)
    assert student_t_quantile(0.9, None) == pytest.approx(scipy.stats.norm.ppf(0.9))


def test_deviations_add_inside_a_family_and_not_between() -> None:
    calibration = make_calibration(
        step_residual_log=0.1, factor_log_std={"forward": 0.3, "backward": 0.2, "dp_comm": 0.5}
    )
    time_s = {"forward": 1.0, "backward": 2.0, "dp_comm": 1.0, "idle": 1.0}
    compute, communication = 0.2 * 0.3 + 0.4 * 0.2, 0.2 * 0.5
    assert step_time_log_std(calibration, time_s) == pytest.approx(
        math.sqrt(0.1**2 + compute**2 + communication**2)
    )


def test_the_interval_covers_what_its_model_draws() -> None:
    """Runs drawn with one unknown a family, and scatter, fall inside as often as promised."""
    rng = np.random.default_rng(0)
    time_s = {"forward": 1.0, "backward": 2.0, "dp_comm": 0.5, "idle": 0.5}
    calibration = make_calibration(
        step_residual_log=0.05, factor_log_std={"forward": 0.12, "backward": 0.12, "dp_comm": 0.3}
    )
    interval = step_time_interval(calibration, time_s)
    draws = 20_000
    compute, communication = rng.normal(0, 0.12, draws), rng.normal(0, 0.3, draws)
    steps = 0.5 + 3.0 * np.exp(compute) + 0.5 * np.exp(communication)
    steps = steps * np.exp(rng.normal(0, 0.05, draws))
    inside = np.mean((steps >= interval.low) & (steps <= interval.high))
    # first order in the factors: 1 % beside 5 sigma of the draw
    assert abs(inside - 0.8) < 0.01 + 5 * math.sqrt(0.8 * 0.2 / draws)


def test_operators_outside_their_curves_widen_the_interval() -> None:
    calibration = Calibration(id="c", created="", source="t", step_residual_log=0.2)
    inside = step_time_interval(calibration, {"compute": 1.0})
    beyond = step_time_interval(calibration, {"compute": 1.0}, extrapolated=True)
    ratio = math.log(beyond.high) / math.log(inside.high)
    assert ratio == pytest.approx(math.hypot(0.2, 0.1) / 0.2)
    assert beyond.low < inside.low


def test_files_round_trip_as_yaml_and_json(tmp_path: Path) -> None:
    calibration = make_calibration(factors={"forward": 1.25}, step_residual_dof=4.0)
    for name in ("c.yaml", "c.json"):
        path = save_calibration(calibration, tmp_path / name)
        assert load_calibration(path) == calibration
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.json", "c.yaml"]


def test_own_calibrations_are_found_by_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPWRIGHT_HOME", str(tmp_path))
    calibration = with_id(make_calibration(), "mine")
    save_calibration(calibration)
    assert load_calibration(calibration.id) == calibration
    with pytest.raises(InputError, match=f"did you mean '{calibration.id}'"):
        load_calibration(calibration.id + "x")


def test_ids_name_the_content_and_not_the_hour() -> None:
    one = with_id(make_calibration(), "x")
    assert with_id(make_calibration(created="2027-01-01T00:00:00+00:00"), "x").id == one.id
    assert with_id(make_calibration(host_floor_s=1e-5), "x").id != one.id


def test_wrong_files_are_input_errors(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("id: c\ncreated: ''\nsource: s\nfactor: {forward: 1}\n")
    with pytest.raises(InputError, match=r"c\.yaml:4.*factor"):
        load_calibration(path)
    with pytest.raises(InputError, match="cannot read"):
        load_calibration(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="YAML or JSON"):
        save_calibration(make_calibration(), tmp_path / "c.txt")


@pytest.mark.slow
def test_every_shipped_calibration_loads_and_each_gpu_has_a_prior() -> None:
    for name in shipped_calibration_ids():
        assert load_calibration(name).id == name
    gpu = load_cluster("local_2cpu").node.gpu
    assert default_calibration(gpu).stack_id == ""
    unknown = gpu.model_copy(update={"name": "nobody_knows", "kind": "rocm"})
    assert default_calibration(unknown).id.startswith("prior-")
