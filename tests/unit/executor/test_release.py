"""A run's checkpoint becomes a release: its weights, its tokenizer, by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flopwright.cli import main
from flopwright.executor.checkpoint.save import RunState, save
from flopwright.executor.data.tokenizer import CharacterTokenizer
from flopwright.models.formats.codecs import decode, encode
from flopwright.models.formats.layout import LAYOUTS
from flopwright.models.hf.safetensors_io import open_checkpoint, read_tensors
from flopwright.models.transformer.module import Stage, build_stage, init_weights_
from flopwright.spec.load import load_model

LAST = "model.layers.{}.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stage, Path]:
    """A run with one checkpoint, optimizer state among its tensors."""
    folder = tmp_path_factory.mktemp("run")
    spec = load_model("kimi_k2_mini")
    stage = build_stage(spec, range(-1, spec.num_layers + 1))
    init_weights_(stage, spec, seed=4)
    (folder / "tokenizer.json").write_text(CharacterTokenizer(" abc").to_json())
    tensors = dict((*stage.named_parameters(), *stage.named_buffers()))
    held = {**tensors, "optimizer.exp_avg.model.norm.weight": torch.ones(3)}
    state = RunState(step=7, seed=3, model=spec, tokenizer_file=folder / "tokenizer.json")
    save(folder / "checkpoint", held, state)
    return stage, folder


@pytest.mark.parametrize("to", ["bf16", "block_fp8", "int4_g32", "mxfp4"])
def test_weights_are_those_of_the_run(
    to: str, run: tuple[Stage, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage, folder = run
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(folder), str(tmp_path / "out"), "--to", to, "--json"])
    assert ended.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["files"]) == (7, 1)
    released = dict(read_tensors(open_checkpoint(tmp_path / "out")))
    name = LAST.format(stage.spec.num_layers - 1)
    expert = dict(stage.named_parameters())[name].detach()[3].bfloat16()
    layout = next((x for n, x in LAYOUTS.items() if n == to), None)
    expected = expert if layout is None else decode(layout, encode(layout, expert))
    assert torch.equal(released[name][3], expected.to(released[name].dtype))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (
        folder / "tokenizer.json"
    ).read_text()


def test_what_is_refused(
    run: tuple[Stage, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = run
    out = str(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        ([str(folder), out, "--to", "fp7"], "no such format is written"),
        ([str(folder), out, "--to", "bf16", "--step", "8"], "no checkpoint of that step"),
        ([str(folder), out, "--to", "bf16", "--dry-run"], "--dry-run"),
        ([str(tmp_path / "empty"), out, "--to", "bf16"], "no checkpoint in the folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["convert", *arguments])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
    assert not Path(out).exists()


def test_a_model_without_experts_is_no_int4_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = load_model("first_steps")
    stage = build_stage(spec, range(-1, spec.num_layers + 1))
    init_weights_(stage, spec, seed=4)
    (tmp_path / "tokenizer.json").write_text(CharacterTokenizer(" abc").to_json())
    state = RunState(step=7, seed=3, model=spec, tokenizer_file=tmp_path / "tokenizer.json")
    save(tmp_path / "checkpoint", dict(stage.named_parameters()), state)
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path), str(tmp_path / "out"), "--to", "int4_g32"])
    assert ended.value.code == 2
    assert "no matrix here is of a kind that int4_g32 releases quantise" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
