"""`flopwright import`: a job's configuration in, a plan file and its prediction out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flopwright.cli import main
from flopwright.spec.load import load_plan

ARGUMENTS = (
    "--seq-length 4096 --bf16 --micro-batch-size 1 --global-batch-size 128 --train-iters 500 "
    "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--use-distributed-optimizer --tp-comm-overlap\n"
)


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main([*argv, "--json"])
    return int(str(end.value.code or 0)), capsys.readouterr().out


def test_a_plan_file_is_written_and_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = tmp_path / "train.sh", tmp_path / "plan.yaml"
    job.write_text(ARGUMENTS)
    given = ["--model", "llama31_70b", "--cluster", "64_h100", "--out", str(out)]
    code, text = _run(capsys, "import", "megatron", str(job), *given)
    data = json.loads(text)
    assert code == 0, data
    plan = load_plan(out).parallel
    assert (plan.tp, plan.pp, plan.dp_shard, plan.zero_stage) == (4, 2, 8, 1)
    assert data["not_read"] == ["--tp-comm-overlap"]
    assert data["prediction"]["metrics"]["step_time_s"] > 0

    code, text = _run(capsys, "import", "megatron", str(job), *given)
    assert code == 2
    assert json.loads(text)["error"][0]["rule"] == "the file exists"


@pytest.mark.parametrize("missing", ["job", "seq_len"])
def test_bad_input_ends_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    job = tmp_path / "ds.json"
    if missing == "seq_len":
        job.write_text("{}")
    given = ["--model", "llama31_8b", "--cluster", "8_h100", "--out", str(tmp_path / "plan.yaml")]
    code, _ = _run(capsys, "import", "deepspeed", str(job), *given)
    assert code == 2
    assert not (tmp_path / "plan.yaml").exists()
