"""`flopwright convert`: what it prints, what it refuses, and the page's own commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from flopwright.cli import main
from flopwright.models.hf.safetensors_io import open_checkpoint, save_stage
from flopwright.models.transformer.module import build_stage, init_weights_
from flopwright.spec.load import load_model

PAGE = Path(__file__).resolve().parents[3] / "docs" / "convert.md"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = load_model("kimi_k2").shrunk(hidden_size=128, num_layers=2, vocab_size=64)
    assert spec.moe is not None
    moe = spec.moe.model_copy(update={"expert_intermediate_size": 64, "num_experts": 4})
    spec = spec.model_copy(update={"moe": moe.model_copy(update={"top_k": 2})})
    stage = build_stage(spec, range(-1, 3), dtype=torch.bfloat16)
    init_weights_(stage, spec, seed=1)
    folder = tmp_path_factory.mktemp("cli") / "model"
    save_stage(stage, folder)
    return folder


def fails(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    assert ended.value.code == 2


def runs(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    assert ended.value.code == 0


def test_json_and_text(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs("convert", checkpoint, tmp_path / "fp8", "--to", "block_fp8", "--json")
    said = json.loads(capsys.readouterr().out)
    assert (said["from"], said["to"], said["written"]) == ("bf16", "block_fp8", True)
    assert said["checked_against_model"]
    files = [p.stat().st_size for p in (tmp_path / "fp8").glob("*.safetensors")]
    assert said["files"] == len(files) == 1
    assert 0 < sum(files) - said["bytes_written"] < 100_000  # the header
    open_checkpoint(tmp_path / "fp8")
    runs("convert", tmp_path / "fp8", tmp_path / "back", "--to", "bf16", "--shard-size", "50 kB")
    text = capsys.readouterr().out
    assert f"{said['bytes_read']:,} bytes" in text
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2


def test_a_dry_run_writes_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    runs("convert", checkpoint, out, "--to", "mxfp4", "--dry-run")
    text = capsys.readouterr().out
    assert "mxfp4 would take" in text
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--to", "fp7"], "no such format is written"),
        (["--to", "mxfp4", "--scale-rule", "flor"], "did you mean 'floor'?"),
        (["--to", "mxfp4", "--shard-size", "5"], "--shard-size"),
        (["--to", "mxfp4", "--shard-size", "0 GB"], "must be positive"),
    ],
)
def test_wrong_options(
    options: list[str], words: str, checkpoint: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fails("convert", checkpoint, tmp_path / "out", *options)
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_errors_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails("convert", tmp_path / "none", tmp_path / "out", "--to", "bf16", "--json")
    (error,) = json.loads(capsys.readouterr().out)["error"]
    assert error["file"].endswith("config.json")


def test_no_room_on_the_disk(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("flopwright.models.formats.job.free_bytes", lambda _: 1000)
    fails("convert", checkpoint, tmp_path / "out", "--to", "bf16")
    assert "not enough room on the disk" in capsys.readouterr().err


def test_the_page_runs_and_names_every_option(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    page = PAGE.read_text()
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) >= 4
    monkeypatch.chdir(tmp_path)
    Path("Kimi-K2").symlink_to(checkpoint)
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "flopwright"
        runs(*arguments)
    capsys.readouterr()
    runs("convert", "--help")
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert [o for o in sorted(options) if o not in page] == []
