"""Scores of a tiny table against hand-computed predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flopwright.cli import main
from flopwright.errors import InputError
from flopwright.simulator.accuracy.rl.load import FOLDER, load_scenarios
from flopwright.simulator.accuracy.rl.predictor import Predictor
from flopwright.simulator.accuracy.rl.report import rl_report
from flopwright.simulator.accuracy.rl.rows import read_rows
from flopwright.simulator.accuracy.rl.schema import RlScenario
from flopwright.simulator.accuracy.rl.score import holds, weighted_quantile

HEAD = "id,source,system,model,metric,value,unit\n"


def _queue(name: str, rows: list[dict[str, Any]], **inputs: Any) -> dict[str, Any]:
    base = {"concurrent": 100, "batch": 100, "queue": 1, "utilization": 0.5, "tail": 1.5}
    experiment = {"kind": "async_queue", **base, **inputs}
    return {"kind": "published_rl", "name": name, "preset": name[0], "experiment": experiment,
            "rows": rows}  # fmt: skip


def _push(name: str, size: str, rows: list[dict[str, Any]], fits: list[Any]) -> dict[str, Any]:
    sync = {"path": "relay", "weights": size, "tensors": 10, "bucket": "900 GB", "senders": 8,
            "receivers": 8, "engine_ranks": 8, "per_bucket": "0 s"}  # fmt: skip
    return {
        "kind": "published_rl", "name": name, "preset": "push", "rows": rows, "fits": fits,
        "experiment": {"kind": "weight_sync", "sync": sync,
                       "cluster": {"node_type": "hgx_h800", "gpus": 16}},
    }  # fmt: skip


RATE = {"field": "sync.rate", "row": "c1", "metric": "sync_time", "low": 1e9, "high": 1e13}
SCENARIOS = [
    # staleness 100 * 1.5 / 100 + 0.5 = 2.0
    _queue("a_one", [
        {"id": "f1", "class": "F1", "metric": "staleness"},
        {"id": "r1", "class": "R", "metric": "b_two.staleness", "over": "staleness",
         "partner": "f1"},
        {"id": "r2", "class": "R", "metric": "b_two.staleness", "over": "staleness"},
        {"id": "o1", "class": "O", "checks": ["staleness < b_two.staleness < 2 * staleness",
                                              "value > f1"]},
        {"id": "o2", "class": "O", "checks": ["staleness > b_two.staleness"]},
        {"id": "n1", "class": "N", "reason": "nobody knows"},
    ]),
    # 200 * 1.5 / 100 + 0.5 = 3.5
    _queue("b_two", [{"id": "f2", "class": "F2", "metric": "staleness"},
                     {"id": "f3", "class": "F1", "metric": "no_such"}], concurrent=200),
    _push("push_small", "65.5 GB", [{"id": "c1", "class": "C", "reason": "fixes the rate"}],
          [RATE]),
    _push("push_large", "145.4 GB", [{"id": "f4", "class": "F2", "metric": "sync_time"}],
          [{**RATE, "scenario": "push_small"}]),
]  # fmt: skip
ROWS = """f1,s,x,m,staleness,2.5,versions
f2,s,x,m,staleness,3.0-4.0,versions
f3,s,x,m,staleness,1,versions
f4,s,x,m,stall,1.4,s
r1,s,x,m,staleness,4.0,versions
r2,s,x,m,ratio,1.5,x
c1,s,x,m,stall,0.64,s
o1,s,x,m,order,9,x
o2,s,x,m,order,1,x
n1,s,x,m,what,words,-
z9,s,x,m,what,1,-
"""


def _write(folder: Path, scenarios: list[dict[str, Any]] = SCENARIOS, rows: str = ROWS) -> Path:
    (folder / "scenarios").mkdir()
    for place, scenario in enumerate(scenarios):
        path = folder / "scenarios" / f"file_{place}.yaml"
        path.write_text(yaml.safe_dump(scenario, sort_keys=False))
    (folder / "rows.csv").write_text(HEAD + rows)
    return folder / "rows.csv"


def test_every_class_is_scored_as_its_rule_says(tmp_path: Path) -> None:
    report = rl_report(_write(tmp_path), tmp_path / "scenarios")
    errors = {s.id: s.error for s in report.scored}
    assert errors["f1"] == pytest.approx(2.0 / 2.5 - 1)
    assert errors["f2"] == 0.0  # inside its range
    assert errors["r1"] == pytest.approx(1.75 / (4.0 / 2.5) - 1)
    assert errors["r2"] == pytest.approx(1.75 / 1.5 - 1)
    # bytes over the rate of the row that it is fitted on, rl_rows.md section 5
    assert errors["f4"] == pytest.approx(145.4 / 65.5 * 0.64 / 1.4 - 1, abs=0.01)
    assert {o.id: o.right for o in report.ordered} == {"o1": True, "o2": False}
    skipped = {s.id: (s.lost, s.why) for s in report.skipped}
    assert skipped["n1"] == (False, "nobody knows")
    assert skipped["z9"] == (False, "no scenario names it")
    assert skipped["f3"][0]
    assert "no metric" in skipped["f3"][1]
    assert "c1" in skipped
    (fitted,) = report.fitted
    assert fitted.value == pytest.approx(65.5e9 / 0.64, rel=0.01)


def test_the_json_has_the_promised_keys_and_presets_count_once(tmp_path: Path) -> None:
    data = rl_report(_write(tmp_path), tmp_path / "scenarios").to_data()
    assert set(data) == {"absolute", "ratio", "order", "skipped", "free_parameters"}
    for key in ("absolute", "ratio"):
        assert {"n", "coverage", "median_abs_error", "p90_abs_error", "per_scenario"} <= set(
            data[key]
        )
    assert data["absolute"]["n"] == 3
    assert data["absolute"]["coverage"] == pytest.approx(3 / 4)
    assert data["absolute"]["F1"]["n"] == 1
    assert data["order"]["n"] == 2
    assert data["order"]["right"] == 1
    assert data["free_parameters"]["n"] == 1


def test_numbers_of_a_system_are_listed_once_with_their_rows(tmp_path: Path) -> None:
    chosen = {"chosen": {"utilization": ["z8", "z9"]}}
    both = [{**SCENARIOS[0], **chosen}, {**SCENARIOS[1], **chosen}, *SCENARIOS[2:]]
    free = rl_report(_write(tmp_path, both), tmp_path / "scenarios").to_data()["free_parameters"]
    assert free["of_systems"] == [
        {"of": ["a", "b"], "field": "utilization", "value": 0.5, "rows": ["z8", "z9"]}
    ]
    assert free["n"] == len(free["fitted"]) + 1


def test_an_input_that_turns_out_impossible_loses_its_row_and_no_other(tmp_path: Path) -> None:
    lengths = {"mean": 100, "sigma": 0.5, "cap": 1000}
    engine = {"decode": {"batch": [1, 2], "base": [0.01, 0.01], "per_context_token": [0, 0],
                         "interpolate": True}}  # fmt: skip
    loop = {
        "kind": "loop", "model": "qwen25_7b", "cluster": {"node_type": "hgx_h100", "gpus": 1},
        "batch": {"prompts": 4, "samples": 2, "lengths": lengths},
        "rollout": {"gpus": 1, "engine": {"numbers": engine}},
        "layout": {"kind": "async", "staleness": 1, "sync_every": 3},
    }  # fmt: skip
    rows = [{"id": "f5", "class": "F2", "metric": "step_time"}]
    odd = {
        "kind": "published_rl",
        "name": "odd",
        "preset": "odd",
        "experiment": loop,
        "rows": rows,
    }
    report = rl_report(
        _write(tmp_path, [*SCENARIOS, odd], ROWS + "f5,s,x,m,step,9,s\n"), tmp_path / "scenarios"
    )
    (lost,) = (s for s in report.skipped if s.id == "f5")
    assert lost.lost
    assert "sync_every (3) must divide" in lost.why
    assert {s.id for s in report.scored} == {"f1", "f2", "f4", "r1", "r2"}


def test_a_quantile_weighs_and_equal_weights_give_the_usual_median() -> None:
    assert weighted_quantile([3.0, 1.0, 2.0], [1, 1, 1], 0.5) == 2.0
    assert weighted_quantile([4.0, 1.0, 2.0, 3.0], [1, 1, 1, 1], 0.5) == 2.5
    # two presets: ten rows of 1.0 weigh as much as one of 9.0
    assert weighted_quantile([1.0] * 10 + [9.0], [0.1] * 10 + [1.0], 0.9) == 9.0
    assert weighted_quantile([1.0] * 10 + [9.0], [1.0] * 11, 0.5) == 1.0


def test_comparisons_take_chains_factors_and_measured_rows(tmp_path: Path) -> None:
    rows = read_rows(_write(tmp_path))
    predictor = Predictor(load_scenarios(tmp_path / "scenarios"), rows)
    for check, right in (
        ("staleness < 2.1", True),
        ("1.9 < staleness < 2.1", True),
        ("2 * staleness >= b_two.staleness", True),
        ("f1 < staleness", False),
        ("value == staleness".replace("==", ">="), True),
    ):
        assert holds(predictor, "a_one", check, rows["o1"]) is right, check
    with pytest.raises(InputError, match="no metric"):
        holds(predictor, "a_one", "nothing < 1", rows["o1"])


def _broken(tmp_path: Path, **changes: Any) -> str:
    scenario = {**SCENARIOS[0], **changes}
    _write(tmp_path, [scenario, *SCENARIOS[1:]])
    with pytest.raises(InputError) as caught:
        load_scenarios(tmp_path / "scenarios")
    return str(caught.value)


ROW = {"id": "f1", "class": "F1", "metric": "staleness"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rows": [{**ROW, "class": "F9"}]}, "class"),
        ({"rows": [{"id": "f1", "class": "F1"}]}, "needs a metric"),
        ({"rows": [{"id": "f1", "class": "R", "metric": "staleness"}]}, "denominator"),
        ({"rows": [{**ROW, "partner": "f2"}]}, "belong to rows of class R"),
        ({"rows": [{"id": "o", "class": "O", "checks": ["a plus b"]}]}, "no comparison"),
        ({"rows": [{"id": "o", "class": "O"}]}, "needs checks"),
        ({"rows": [{"id": "n", "class": "N"}]}, "needs a reason"),
        ({"rows": [ROW, {**ROW}]}, "stands twice"),
        ({"rows": [{**ROW, "id": "f2"}]}, "stands in scenario"),
        ({"rows": [{**ROW, "metric": "nowhere.staleness"}]}, "no such scenario"),
        ({"name": "b_two"}, "the name stands in"),
        ({"experiment": None}, "need an experiment"),
        ({"unknown": 1}, "unknown key"),
        ({"chosen": {"load.tail": ["f1"]}}, "no number at load.tail"),
        ({"experiment": {"kind": "loops"}}, "kind"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    assert text in _broken(tmp_path, **changes)


def test_the_command_prints_left_out_rows_and_writes_its_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, out = _write(tmp_path), tmp_path / "out.json"
    with pytest.raises(SystemExit) as end:
        main(["accuracy", str(rows), "--kind", "rl", "--scenarios", str(tmp_path / "scenarios"),
              "--json", str(out)])  # fmt: skip
    assert end.value.code in (0, None)
    shown = capsys.readouterr().out
    for text in ("left out: 4 rows", "no scenario names it", "nobody knows", "1/2 right"):
        assert text in shown
    table = shown[shown.index("by scenario") : shown.index("\nabsolute")]
    for scenario in json.loads(out.read_text())["absolute"]["per_scenario"]:
        assert scenario in table
    assert json.loads(out.read_text())["order"]["right"] == 1


def test_every_violation_of_rows_and_scenarios_comes_at_once_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [{**SCENARIOS[0], "unknown": 1}, {**SCENARIOS[1], "preset": ""}]
    rows = _write(tmp_path, bad, "a,b,c\nf1,s,x,m,t,1,s\nf1,s,x,m,t,1,s\n")
    with pytest.raises(SystemExit) as end:
        main(["accuracy", str(rows), "--kind", "rl", "--scenarios", str(tmp_path / "scenarios")])
    assert end.value.code == 2
    shown = capsys.readouterr().err
    for text in ("unknown key", "preset", "wrong number of cells", "stands twice"):
        assert text in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--kind", "rls"], "training or rl"),
        (["--scenarios", "x"], "--kind rl"),
        (["--kind", "rl"], "needs a CSV"),
        (["rows.csv", "--kind", "rl", "--by", "gpu"], "does not go with"),
        (["rows.csv", "--kind", "rl", "--scenarios", "tests"], "rows.csv"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["accuracy", *options])
    assert end.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def shipped() -> dict[str, RlScenario]:
    return load_scenarios(FOLDER)


@pytest.mark.slow
def test_shipped_scenarios_load_and_say_what_they_assume(shipped: dict[str, RlScenario]) -> None:
    assert len(shipped) > 100
    for scenario in shipped.values():
        if any(r.row_class in {"F1", "F2", "R"} for r in scenario.rows):
            assert scenario.url, scenario.name
            assert scenario.sources or scenario.assumed, scenario.name


@pytest.mark.slow
def test_shipped_scenarios_give_every_published_row_one_class(
    measured_data: Path, shipped: dict[str, RlScenario]
) -> None:
    rows = read_rows(measured_data / "validation" / "rl_runs.csv")
    classes = {(r.id, r.part): r.row_class for s in shipped.values() for r in s.rows}
    assert set(rows) <= {row_id for row_id, _ in classes}
    count = {k: len({i for (i, _), c in classes.items() if c == k and i in rows})
             for k in ("F1", "F2", "R", "O", "C", "D", "N")}  # fmt: skip
    assert count == {"F1": 28, "F2": 39, "R": 36, "O": 71, "C": 16, "D": 8, "N": 54}
