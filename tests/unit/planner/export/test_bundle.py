"""The bundle: deterministic bytes, a manifest that holds, a README that tells the numbers."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flopwright.errors import InputError
from flopwright.plan.file import PlanFile
from flopwright.planner.export.bundle import EXECUTABLE, bundle
from flopwright.planner.export.folder import check_folder, write_folder
from flopwright.planner.export.readme import FILES
from flopwright.planner.fallback import Fallback
from flopwright.report.check import CheckBounds
from flopwright.report.metrics import Prediction
from flopwright.report.trace import Trace
from flopwright.spec.load import load_plan, make_plan_file


def test_same_plan_same_bytes(k2: PlanFile, prediction: Prediction, trace: Trace) -> None:
    assert bundle(k2, prediction, trace) == bundle(k2, prediction, trace)


def test_manifest_and_readme_name_every_file(
    k2: PlanFile, prediction: Prediction, trace: Trace
) -> None:
    files = bundle(k2, prediction, trace)
    manifest = json.loads(files["manifest.json"])
    assert manifest["calibration_id"] == "h800-prior"
    assert set(manifest["sha256"]) == set(files) - {"manifest.json"}
    for name, digest in manifest["sha256"].items():
        assert hashlib.sha256(files[name]).hexdigest() == digest
    assert set(FILES) == set(files) - {"README.md"}


def test_plan_loads_back_with_its_prediction(
    k2: PlanFile, prediction: Prediction, trace: Trace, tmp_path: Path
) -> None:
    write_folder(tmp_path / "b", bundle(k2, prediction, trace), executable=EXECUTABLE)
    plan = load_plan(tmp_path / "b" / "plan.yaml")
    assert plan.parallel == k2.parallel
    assert plan.scenario == k2.scenario
    assert plan.predicted is not None
    assert plan.predicted.step_time_s == prediction.metrics.step_time_s
    assert plan.predicted.peak_memory_bytes == 32 * 2**30
    mode = (tmp_path / "b" / "measure.sh").stat().st_mode
    assert mode & 0o111


def test_readme_tells_expectations_and_the_stop_rule(
    k2: PlanFile, prediction: Prediction, trace: Trace
) -> None:
    text = bundle(k2, prediction, trace)["README.md"].decode()
    for words in (
        "pp16 ep16 dp128 zero1 mbs1 selective",
        "12.5 s (80% interval: 10 s to 16 s)",
        "32.0 GiB of 80.0 GiB",
        "## At step 20",
        "Stop rule",
        "median step time above 24 s",
        "## Not expressed",
        "--checkpoint-every STEPS --resume",
        "deepspeed.json: pp 16 with schedule 1f1b",
        "tokens are routed evenly",
        "h800-prior",
        "sbatch sbatch.sh",
    ):
        assert words in text, words


def test_check_bounds_come_from_the_prediction(
    k2: PlanFile, prediction: Prediction, trace: Trace
) -> None:
    bounds = CheckBounds.model_validate_json(bundle(k2, prediction, trace)["check.json"])
    assert (bounds.step_time_low_s, bounds.step_time_high_s) == (10.0, 16.0)
    assert bounds.peak_memory_bytes == 32 * 2**30
    assert bounds.memory_stop_bytes < 80 * 2**30
    # ln(163,840) = 12.007 and the margin
    assert bounds.loss_stop == pytest.approx(12.0067 + 0.5, abs=1e-3)


def test_trace_opens_as_chrome_json(k2: PlanFile, prediction: Prediction, trace: Trace) -> None:
    data = json.loads(gzip.decompress(bundle(k2, prediction, trace)["predicted.trace.json.gz"]))
    slices = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in slices] == ["F(0,0)", "recv"]
    assert slices[0]["dur"] == 4e6
    assert data["distributedInfo"]["world_size"] == 2048


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    to = tmp_path / "deep" / "bundle"
    write_folder(to, {"a": b"1", "b.sh": b"2"}, executable={"b.sh"})
    assert sorted(p.name for p in to.iterdir()) == ["a", "b.sh"]
    mask = os.umask(0)
    os.umask(mask)
    modes = [p.stat().st_mode & 0o777 for p in (to, to / "a", to / "b.sh")]
    assert modes == [0o777 & ~mask, 0o666 & ~mask, 0o777 & ~mask]
    (to / "run").mkdir()
    with pytest.raises(InputError, match="not empty"):
        write_folder(to, {"a": b"3"})
    assert (to / "a").read_bytes() == b"1"
    write_folder(to, {"a": b"3"}, force=True)
    assert (to / "a").read_bytes() == b"3"
    assert (to / "run").is_dir()
    assert not list(to.parent.rglob(".export-*"))


def test_nothing_is_left_where_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_folder(tmp_path / "new", {"a": b"1", "no/such/folder": b"2"})
    assert not list(tmp_path.iterdir())


def test_no_file_is_replaced_where_a_folder_stands_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "plan.yaml").mkdir()
    with pytest.raises(InputError, match=r"plan\.yaml: is a folder"):
        write_folder(tmp_path, {"a": b"1", "plan.yaml": b"2", "z": b"3"}, force=True)
    assert (tmp_path / "a").read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "plan.yaml"]


def test_a_place_below_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for to in (tmp_path / "file" / "b", tmp_path / "file" / "b" / "c", tmp_path / ("x" * 300)):
        with pytest.raises(InputError, match="cannot be written"):
            check_folder(to, ["a"])
    check_folder(tmp_path / "new" / "deep", ["a"])
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_or_link_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="not a folder"):
        write_folder(tmp_path / "file", {"a": b"1"}, force=True)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(InputError, match="link"):
        write_folder(tmp_path / "link", {"a": b"1"}, force=True)


def test_a_single_node_readme_has_a_pasteable_command(
    make: Callable[..., PlanFile], prediction: Prediction, trace: Trace
) -> None:
    files = bundle(make(dp_shard=4), prediction, trace)
    assert ". ./ENV.sh && torchrun --standalone" in files["README.md"].decode()


def test_readme_says_first_what_the_executor_refuses(
    k2: PlanFile, prediction: Prediction, trace: Trace
) -> None:
    plain = bundle(k2, prediction, trace)["README.md"].decode()
    warned = bundle(k2, prediction, trace, refused=["parallel.vpp 4"])["README.md"].decode()
    assert "does not run this plan yet" not in plain
    before_run = warned.split("## Run it")[0]
    assert "does not run this plan yet" in before_run
    assert "parallel.vpp 4" in before_run


def test_fallbacks_stand_in_the_bundle_with_their_numbers(
    k2: PlanFile, prediction: Prediction, trace: Trace, tmp_path: Path
) -> None:
    cluster = k2.scenario.cluster.model_copy(update={"num_nodes": 128, "name": "half"})
    scenario = k2.scenario.model_copy(update={"cluster": cluster})
    half = k2.parallel.model_copy(update={"dp_shard": 64})
    spare = Fallback(
        ranks=1024,
        nodes=128,
        nodes_lost=128,
        step_time_s=25.0,
        slower=1.0,
        peak_memory_bytes=70 * 2**30,
        headroom=0.1,
        plan=make_plan_file(scenario, half, half.label()),
    )
    files = bundle(k2, prediction, trace, fallbacks=[spare])
    write_folder(tmp_path / "b", files, executable=EXECUTABLE)
    assert load_plan(tmp_path / "b" / "fallback-1024.yaml") == spare.plan
    data = json.loads(files["fallbacks.json"])
    assert data["ranks"] == 2048
    (row,) = data["fallbacks"]
    assert row["file"] == "fallback-1024.yaml"
    assert (row["step_time_s"], row["peak_memory_bytes"]) == (25.0, 70 * 2**30)
    text = files["README.md"].decode()
    assert "When nodes are lost" in text
    assert "| `fallback-1024.yaml` |" in text
    assert "70 GiB" in text
    assert set(json.loads(files["manifest.json"])["sha256"]) == set(files) - {"manifest.json"}
    without = bundle(k2, prediction, trace)
    assert json.loads(without["fallbacks.json"])["fallbacks"] == []
    assert "No plan was found" in without["README.md"].decode()


def test_a_plan_that_does_not_fit_says_so(
    k2: PlanFile, prediction: Prediction, trace: Trace
) -> None:
    assert "does not fit" not in bundle(k2, prediction, trace)["README.md"].decode()
    gpu = k2.scenario.cluster.node.gpu.model_copy(update={"hbm_bytes": 2**34})
    node = k2.scenario.cluster.node.model_copy(update={"gpu": gpu})
    cluster = k2.scenario.cluster.model_copy(update={"node": node})
    small = k2.model_copy(update={"scenario": k2.scenario.model_copy(update={"cluster": cluster})})
    text = bundle(small, prediction, trace)["README.md"].decode()
    assert "of 16.0 GiB (**it does not fit**)" in text
