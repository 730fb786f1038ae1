"""What `flopwright plan` says to people: plain numbers, no empty columns, no wide tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from flopwright.cli import main
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.explain import Binding, legend, noticeable, verdict_text
from flopwright.planner.result import SearchResult
from flopwright.planner.search import search
from flopwright.planner.sensitivity import STEP, UNLIMITED
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.training.candidates import SCHEDULES, Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.load import load_scenario
from flopwright.units import plural, show_bytes, show_count, show_percent, show_seconds

MINI = "kimi_k2_mini_2cpu_fp32"
K2 = "kimi_k2_pretrain_2048gpu_h800_bf16"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (0.0001, "less than 0.1 %"),
        (0.0234, "2.3 %"),
        (0.0996, "10 %"),
        (0.15, "15 %"),
        (0.9931, "99.3 %"),
        (0.9999, "100 %"),
        (1.0, "100 %"),
        (-0.05, "-5 %"),
    ],
)
def test_percents_are_plain(share: float, text: str) -> None:
    assert show_percent(share) == text


def test_no_quantity_is_shown_in_powers_of_ten() -> None:
    for power in range(-9, 18):
        for digits in (1.0, 1.2345, 9.99, 9.9996):
            value = digits * 10.0**power
            for show in (show_seconds, show_bytes, show_count, show_percent):
                if show is not show_count or value >= 1e-3:
                    assert not re.search(r"\de[+-]?\d", show(value)), (show.__name__, value)
    assert show_seconds(5.55e-17) == "0 s"
    assert show_seconds(2e-9) == "0.002 us"
    assert show_bytes(1023 * 2**30) == "1,023 GiB"
    assert show_bytes(9899) == "9.67 KiB"


def test_one_is_not_many() -> None:
    assert plural(1, "run") == "1 run"
    assert plural(2048, "GPU") == "2,048 GPUs"
    scenario = load_scenario(MINI)
    result = search(scenario, top_k=1, fixed={"pp": 2, "vpp": 1})
    single = result.model_copy(update={"candidates": 1, "fit": 1})
    assert "1 candidate, 1 fit" in verdict_text(single, scenario)


def test_a_nearly_empty_gpu_is_said_plainly() -> None:
    scenario = load_scenario(MINI)
    result = search(scenario, top_k=1)
    best = result.ranked[0].model_copy(update={"headroom": 0.9968})
    changed: SearchResult = result.model_copy(update={"ranked": (best,)})
    assert "99.7 % of its memory free" in verdict_text(changed, scenario)


def test_the_legend_names_each_part_once_and_nothing_else() -> None:
    text = legend(["pp8 vpp4 ep32 dp2x128 zero1 mbs1 selective fp8act", "pp2 dp4 mbs2 optoff"])
    assert [part.split(" = ")[0] for part in text.split("; ")] == [
        "pp", "vpp", "ep", "dp", "zero", "mbs", "selective", "fp8act", "optoff",
    ]  # fmt: skip


def test_the_legend_knows_every_part_of_a_label() -> None:
    plan = ParallelPlan(
        tp=2, pp=2, vpp=2, cp=2, ep=2, dp_replicate=2, dp_shard=4, zero_stage=1,
        schedule="gpipe", recompute="full", fp8_activations=True, activation_offload=True,
        optimizer_offload=True,
    )  # fmt: skip
    parts = plan.label().split()
    assert len(legend([plan.label()]).split("; ")) == len(parts)
    assert legend([plan.model_copy(update={"recompute": "selective"}).label()]).count("=") == len(
        parts
    )
    for schedule in set(SCHEDULES) - {"1f1b", "interleaved_1f1b"}:
        label = plan.model_copy(update={"schedule": schedule}).label()
        assert legend([label]).count("=") == len(parts)


def test_what_hardly_binds_is_not_told() -> None:
    many = tuple(Binding(kind=k, share=s, text=k) for k, s in (("a", 0.5), ("b", 0.009)))
    assert [b.kind for b in noticeable(many)] == ["a"]
    assert [b.kind for b in noticeable(many[1:])] == ["b"]


def _out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit):
        main(["plan", *arguments])
    return capsys.readouterr().out


def test_a_sensitivity_says_what_was_computed(capsys: pytest.CaptureFixture[str]) -> None:
    """The promised gain is that of the step priced again on a faster processor."""
    out = _out(capsys, MINI)
    found = re.search(
        r"10 % faster compute would make the step (\S+) % shorter, unlimited compute (\S+) %", out
    )
    assert found
    scenario = load_scenario(MINI)
    node = scenario.cluster.node
    best = search(scenario, top_k=1).ranked[0].plan
    one = Candidates.from_plans((best,))
    calibration = default_calibration(node.gpu)
    assert all(c.peak_flops_per_s is None for c in calibration.curves)
    base = evaluate(scenario, one, calibration).step_time_s[0]
    # shares of a tenth and more are told in whole percents
    for factor, told, near in ((STEP, found.group(1), 0.05), (UNLIMITED, found.group(2), 0.5)):
        peaks = {k: v * factor for k, v in node.gpu.peak_flops_per_s.items()}
        gpu = node.gpu.model_copy(update={"peak_flops_per_s": peaks})
        better = node.model_copy(update={"gpu": gpu})
        cluster = scenario.cluster.model_copy(update={"node": better})
        faster = evaluate(
            scenario.model_copy(update={"cluster": cluster}), one, calibration
        ).step_time_s[0]
        assert float(told) == pytest.approx(100 * (1 - faster / base), abs=near)
    assert "of the step;" not in out  # a share beside a gain would read as a contradiction


def test_labels_have_colons_and_the_plans_a_legend(capsys: pytest.CaptureFixture[str]) -> None:
    out = _out(capsys, MINI)
    for label in ("Time:", "To the token budget:", "What binds it: compute", "Provenance:"):
        assert label in out
    assert "In a plan: tp = tensor-parallel ranks; pp = pipeline stages" in out
    time_line = next(line for line in out.splitlines() if line.startswith("Time:"))
    assert " 0.0 %" not in time_line


def test_where_nothing_fits_no_column_is_empty_and_a_size_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = load_scenario(MINI).to_data()
    data["cluster"]["node"]["gpu"]["hbm"] = "16 MiB"
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(data))
    out = _out(capsys, str(path))
    assert "times as many GPUs" in out
    found = re.search(r"What would help: GPUs with ([\d.]+) MiB of memory would hold", out)
    assert found
    data["cluster"]["node"]["gpu"]["hbm"] = f"{float(found.group(1)) + 1} MiB"
    path.write_text(yaml.safe_dump(data))
    assert _out(capsys, str(path)).startswith("fits")


@pytest.mark.slow
def test_tables_fold_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = _out(capsys, MINI)
    tables = [line for line in out.splitlines() if re.match(r"[┏┃┡│└#]| {4}\d", line)]
    assert len(tables) > 8
    assert max(map(len, tables)) <= 80
    assert "Why the others lose:" in out
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, _out(capsys, MINI).splitlines())) > 110


@pytest.mark.slow
def test_faster_plans_stand_beside_what_the_best_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = _out(capsys, K2, "--top", "1")
    found = re.search(r"they do not fit \(the best plan that fits takes (\S+) s a step\)", out)
    assert found
    assert 10 < float(found.group(1)) < 40
