"""`flopwright import-model`: a config.json in, a model file out, nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flopwright.cli.import_model import import_model
from flopwright.errors import InputError
from flopwright.models.hf.config_out import hf_config
from flopwright.spec.load import load_model

APP = typer.Typer()
APP.command()(import_model)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "moonlight"
    folder.mkdir()
    data = {**hf_config(load_model("moonlight_16b_a3b")), "attention_dropout": 0.1}
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def run(*arguments: object) -> Any:
    return CliRunner().invoke(APP, [str(a) for a in arguments], catch_exceptions=True)


def test_the_file_loads_as_the_model(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "model.yaml"
    result = run(config, "--out", out)
    assert result.exit_code == 0, result.output
    assert "15,960,110,208" in result.output
    assert "left out: no dropout (attention_dropout 0.1)" in result.output
    spec, expected = load_model(out), load_model("moonlight_16b_a3b")
    assert spec == expected.model_copy(update={"name": "moonlight", "source": spec.source})


def test_json_holds_the_model(config: Path, tmp_path: Path) -> None:
    result = run(config / "config.json", "--out", tmp_path / "m.yaml", "--name", "mine", "--json")
    data = json.loads(result.output)
    assert data["model"]["name"] == "mine"
    assert data["params"] == 15_960_110_208
    assert len(data["left_out"]) == 1


def test_an_existing_file_stays_unless_forced(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.yaml"
    out.write_text("mine")
    result = run(config, "--out", out)
    assert isinstance(result.exception, InputError)
    assert out.read_text() == "mine"
    assert run(config, "--out", out, "--force").exit_code == 0
    assert load_model(out).name == "moonlight"


def test_bad_input_writes_nothing(config: Path, tmp_path: Path) -> None:
    data = json.loads((config / "config.json").read_text())
    (config / "config.json").write_text(json.dumps({**data, "qk_layernorm": True}))
    result = run(config, "--out", tmp_path / "m.yaml")
    assert isinstance(result.exception, InputError)
    assert "qk_layernorm (true)" in str(result.exception)
    result = run(config.parent / "none.json", "--out", tmp_path / "m.yaml")
    assert isinstance(result.exception, InputError)
    assert "none.json" in str(result.exception)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["moonlight"]


def test_a_place_that_cannot_be_written(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = run(config, "--out", tmp_path / "file" / "m.yaml")
    assert isinstance(result.exception, InputError)
    assert "m.yaml" in str(result.exception)
