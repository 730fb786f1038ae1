from __future__ import annotations

import dataclasses
import io
import json
import struct

import pytest

from flopwright.errors import InputError
from flopwright.report.causes import Cause
from flopwright.report.compare import Comparison, compare
from flopwright.report.compare_html import comparison_html
from flopwright.report.compare_png import comparison_png
from flopwright.report.compare_report import (
    ComparedRun,
    ComparisonReport,
    make_report,
    summarise,
)
from flopwright.report.compare_style import label
from flopwright.report.findings import ordered
from flopwright.report.metrics import (
    Fingerprint,
    Interval,
    Measurement,
    Prediction,
    StepMetrics,
)

MIB = 2**20


def metrics(time_s: dict[str, float], memory: tuple[dict[str, int], ...] = ()) -> StepMetrics:
    step = sum(time_s.values())
    return StepMetrics(
        step_time_s=step,
        tokens_per_s=2048 / step,
        tokens_per_s_per_gpu=1024 / step,
        model_flops_per_s_per_gpu=4e9 / step,
        mfu=0.05 / step,
        time_s=time_s,
        memory_bytes=memory,
    )


def prediction(name: str, found: StepMetrics, calibration_id: str = "cal-a") -> Prediction:
    step = found.step_time_s
    return Prediction(
        plan_name=name,
        metrics=found,
        step_time_interval=Interval(low=step / 1.25, high=step * 1.25),
        provenance="calibrated",
        calibration_id=calibration_id,
    )


def measurement(name: str, found: StepMetrics) -> Measurement:
    return Measurement(
        id=f"id-{name}",
        created="2026-01-02T03:04:05+00:00",
        plan_name=name,
        plan={},
        metrics=found,
        step_time_p10_s=found.step_time_s * 0.9,
        step_time_p90_s=found.step_time_s * 1.1,
        step_time_samples_s=(found.step_time_s,) * 4,
        discarded_steps=2,
        fingerprint=Fingerprint(
            machine="m",
            processor="p",
            num_cores=2,
            world_size=2,
            threads_per_rank=1,
            memory_bytes=8 * 2**30,
            python="3.11.7",
            tool_version="0.1.0",
        ),
        noise_floor=0.03,
    )


MEASURED = metrics(
    {"forward": 0.4, "backward": 1.0, "dp_comm": 0.3, "optimizer": 0.1, "idle": 0.2},
    ({"weights": 20 * MIB, "activations": 30 * MIB, "reserved": 90 * MIB}, {"weights": 60 * MIB}),
)
PREDICTED = metrics(
    {"forward": 0.5, "backward": 0.7, "dp_comm": 0.3, "optimizer": 0.1},
    ({"weights": 80 * MIB}, {"weights": 54 * MIB, "temporaries": 3 * MIB}),
)


def example() -> Comparison:
    return compare(prediction("dp2", PREDICTED), measurement("dp2", MEASURED))


def test_signed_errors_are_predicted_minus_measured_over_measured() -> None:
    comparison = example()
    assert comparison.error("step_time_s") == pytest.approx((1.6 - 2.0) / 2.0)
    assert comparison.error("tokens_per_s") == pytest.approx(2.0 / 1.6 - 1)
    # fullest stage of each side without "reserved": 80 MiB predicted, 60 MiB measured
    assert comparison.error("tensor_memory_bytes") == pytest.approx(80 / 60 - 1)
    assert comparison.error("hfu") is None
    by_name = {m.metric: m for m in comparison.metrics}
    assert comparison.metrics[0].metric == "step_time_s"
    assert by_name["step_time_s"].in_interval  # exactly at the upper end, 1.6 * 1.25
    assert by_name["mfu"].in_interval is None


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (4.28, "rank 1: predicted 306 ms, measured 1.31 s (x 4.28); "),
        (9.52, "rank 1: predicted 306 ms, measured 1.31 s (x 4.28; the cause alone x 9.52); "),
    ],
)
def test_a_findings_first_factor_is_the_ratio_of_what_it_prints(factor: float, text: str) -> None:
    cause = Cause(kind="rank", name="rank 1", ranks=(1,), factor=factor, sigmas=9.0,
                  predicted=0.306, measured=1.31, explained=1.0)  # fmt: skip
    (found,) = ordered([cause], 2.0, [1], None)
    assert found.text.startswith(text)
    unseen = dataclasses.replace(cause, predicted=0.0)
    assert "(x" not in ordered([unseen], 2.0, [1], None)[0].text


def test_shares_of_the_classes_sum_to_the_error_of_the_step() -> None:
    comparison = example()
    total = sum(c.share for c in comparison.time_classes)
    assert total == pytest.approx(comparison.error("step_time_s"), rel=1e-12)
    assert [c.name for c in comparison.time_classes] == [
        "forward", "backward", "dp_comm", "optimizer", "idle",
    ]  # fmt: skip


def test_memory_is_compared_at_the_stage_that_is_fullest_when_measured() -> None:
    by_name = {c.name: c for c in example().memory_classes}
    assert by_name["weights"].predicted == 54 * MIB
    assert by_name["weights"].measured == 60 * MIB
    assert by_name["weights"].share == pytest.approx(-0.1)
    assert "reserved" not in by_name


def test_worst_is_the_class_that_moves_its_whole_most() -> None:
    worst = example().worst
    assert worst is not None
    assert (worst.kind, worst.name) == ("time", "backward")
    assert worst.share == pytest.approx(-0.15)
    assert "predicted 700 ms, measured 1 s" in worst.text
    assert "15.0% of the step too little" in worst.text


def test_outside_the_interval_is_said() -> None:
    slow = metrics({"forward": 2.5})
    comparison = compare(prediction("dp2", PREDICTED), measurement("dp2", slow))
    assert comparison.metrics[0].in_interval is False
    assert comparison.memory_classes == ()


def example_report() -> ComparisonReport:
    runs = []
    for i, (name, held) in enumerate((("dp2 zero1", False), ("pp2", False), ("ep2", True))):
        scale = 1 + 0.25 * i
        slower = {k: v * scale for k, v in MEASURED.time_s.items()}
        measured = metrics(slower, MEASURED.memory_bytes)
        near = metrics(
            {k: v * (0.93 + 0.06 * i) for k, v in measured.time_s.items()}, PREDICTED.memory_bytes
        )
        record = measurement(name, measured)
        runs.append(
            ComparedRun(
                plan_name=name,
                measurement_id=record.id,
                held_out=held,
                before=compare(prediction(name, PREDICTED, "prior-cpu"), record),
                after=compare(prediction(name, near, "cal-b"), record),
            )
        )
    return make_report(runs)


def test_the_report_sums_up_before_and_after() -> None:
    report = example_report()
    assert report.before is not None
    assert report.after is not None
    assert report.held_out is not None
    assert (report.before_calibration, report.after_calibration) == ("prior-cpu", "cal-b")
    assert report.after.median_error == pytest.approx(0.05)
    assert report.held_out.runs == 1
    assert report.held_out.max_error == pytest.approx(0.05)
    # before: 1.6 of 2.0, 2.5 and 3.0 s; only the first lies within a factor of 1.25
    assert report.before.max_error == pytest.approx(1 - 1.6 / 3.0)
    assert report.before.inside_interval == pytest.approx(1 / 3)
    assert report.noise_floor == 0.03
    assert ComparisonReport.model_validate(json.loads(json.dumps(report.to_data()))) == report
    assert summarise(()) is None


def test_the_png_is_a_picture_of_the_right_shape() -> None:
    pytest.importorskip("matplotlib")
    data = comparison_png(example_report())
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 2 * height
    import matplotlib.image

    pixels = matplotlib.image.imread(io.BytesIO(data))
    assert pixels[..., :3].std() > 0.05
    with pytest.raises(InputError, match="no measurement"):
        comparison_png(make_report([]))


def test_the_html_needs_no_network_and_escapes_names() -> None:
    pytest.importorskip("plotly")
    report = example_report()
    run = report.runs[0].model_copy(update={"plan_name": "<script>alert(1)</script>"})
    page = comparison_html(make_report([run, *report.runs[1:]]))
    assert "<script>alert" not in page
    assert "src=" not in page.split("<body>")[1].split("plotly.js")[0]
    assert 'src="https://' not in page
    assert "Plotly.newPlot" in page
    assert "weights (memory)" in page


def test_the_html_says_what_uneven_routing_did_to_the_memory() -> None:
    pytest.importorskip("plotly")
    report = example_report()
    assert "even routing" not in comparison_html(report)
    run = report.runs[0]
    routed = run.after.memory_classes[0].model_copy(update={"share": -0.031})
    after = run.after.model_copy(update={"routed_memory": (routed,)})
    uneven = run.model_copy(update={"after": after, "plan_name": "<b>"})
    page = comparison_html(make_report([uneven, *report.runs[1:]]))
    assert "with even routing, -3.1% given the rows that its experts got</p>" in page
    assert "memory of &lt;b&gt;: " in page


def test_labels_are_for_people() -> None:
    assert label("ep_comm") == "EP comm"
    assert label("optimizer_state") == "optimizer state"


def test_a_memory_class_that_was_not_measured_is_not_compared() -> None:
    """CPU executors meter no temporaries; the predicted ones must not count as an error."""
    step = {"forward": 1.0}
    stages = ({"weights": 50 * MIB, "temporaries": 40 * MIB},)
    comparison = compare(
        prediction("one", metrics(step, stages)),
        measurement("one", metrics(step, ({"weights": 50 * MIB},))),
    )
    assert comparison.error("tensor_memory_bytes") == pytest.approx(0.0)
    assert [c.name for c in comparison.memory_classes] == ["weights"]
