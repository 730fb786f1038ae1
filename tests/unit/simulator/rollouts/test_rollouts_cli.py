"""`flopwright rollouts` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flopwright.cli import main

SMALL = "small_exponential_1gpu"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["rollouts", *args])
    code = end.value.code
    out, err = capsys.readouterr()
    return int(code or 0), out, err


def test_report_says_what_was_asked_for(capsys):
    code, out, _ = run(capsys, SMALL, "--rounds", "3")
    assert code == 0
    for word in (
        "generation", "update", "weight sync", "idle slots", "tail", "staleness", "KV peak",
        "parked", "closed forms", "116 of 128", "assumed",
    ):  # fmt: skip
        assert word in out


def test_json_is_one_object_with_report_and_sweep(capsys):
    code, out, _ = run(capsys, SMALL, "--rounds", "3", "--sweep", "--seed", "4", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["report"]["lambda"] == 0.9
    assert data["report"]["seed"] == 4
    assert len(data["report"]["rounds"]) == 3
    assert 0 < data["sweep"]["best_lambda"] <= 1
    lambdas = [p["lambda"] for p in data["sweep"]["points"]]
    assert lambdas == sorted(lambdas)
    assert 0.9 in lambdas


@pytest.mark.slow
def test_sweep_prints_the_best_and_what_it_trades(capsys):
    args = (SMALL, "--rounds", "3", "--sweep", "--max-staleness", "0.3")
    code, out, _ = run(capsys, *args)
    assert code == 0
    sweep = json.loads(run(capsys, *args, "--json")[1])["sweep"]
    allowed = [p for p in sweep["points"] if p["mean_staleness"] <= 0.3]
    best = max(allowed, key=lambda p: p["attempts_per_s"])["lambda"]
    assert 0.77 in [p["lambda"] for p in allowed]
    assert f"best lambda within a mean staleness of 0.3: {best:g}" in out
    assert "it trades:" in out
    assert "what binds: the staleness bound" in out


def test_lambda_overrides_the_file(capsys):
    code, out, _ = run(capsys, SMALL, "--lambda", "1", "--rounds", "2", "--json")
    assert code == 0
    assert json.loads(out)["report"]["stop_count"] == 128


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["small_exp"], "did you mean"),
        ([SMALL, "--lambda", "1.5"], "at most 1"),
        ([SMALL, "--png", "picture.svg"], "is a PNG"),
        ([SMALL, "--png", "nowhere/picture.png"], "no such folder"),
        (["missing.yaml"], "cannot read"),
        ([SMALL, "--png", f"{'x' * 300}.png"], "too long"),
        ([SMALL, "--max-staleness", "1"], "add --sweep"),
        ([SMALL, "--sweep", "--max-staleness", "inf"], "finite"),
        ([SMALL, "--lambda", "1e-9"], "at least 0.01"),
        ([SMALL, "--rounds", "1000000000"], "10000"),
    ],
)
def test_bad_input_ends_with_code_2_and_leaves_nothing(capsys, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *args)
    assert code == 2
    assert words in err
    assert not out
    assert not list(tmp_path.iterdir())


def test_a_picture_that_cannot_be_written_is_refused_before_the_simulation(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("flopwright.simulator.rollouts.rounds.simulate", None)
    (tmp_path / "d.png").mkdir()
    (tmp_path / "file").write_text("")
    cases = {tmp_path / "d.png": "is a folder", tmp_path / "file" / "x.png": "Not a directory"}
    for path, words in cases.items():
        code, _, err = run(capsys, SMALL, "--png", str(path))
        assert code == 2
        assert words in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.png", "file"]


@pytest.mark.slow
def test_a_loose_bound_on_staleness_does_not_ask_for_an_impossible_lambda(capsys):
    args = (SMALL, "--rounds", "1", "--sweep", "--max-staleness", "100000", "--json")
    code, out, _ = run(capsys, *args)
    assert code == 0
    assert json.loads(out)["sweep"]["points"][0]["lambda"] == 0.01


def test_bad_input_as_json(capsys):
    code, out, _ = run(capsys, SMALL, "--lambda", "0", "--json")
    assert code == 2
    assert json.loads(out)["error"][0]["field"] == "lambda"


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [False, True])
def test_picture(capsys, tmp_path: Path, sweep: bool):
    pytest.importorskip("matplotlib")
    target = tmp_path / "rounds.png"
    args = ["--sweep"] if sweep else []
    code, out, _ = run(capsys, SMALL, "--rounds", "2", "--png", str(target), *args)
    assert code == 0
    assert str(target) in out
    assert target.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [p.name for p in tmp_path.iterdir()] == ["rounds.png"]


def test_attempts_that_have_not_started_hold_no_kv(capsys, tmp_path):
    text = """\
name: one-slot
prompts: 4
prompt_tokens: 1000
lengths: {kind: deterministic, tokens: 10}
lambda: 0.5
slots_per_instance: 1
decode: {per_step: 1 ms}
kv: {per_token: 1 MiB}
"""
    path = tmp_path / "one.yaml"
    path.write_text(text)
    code, out, _ = run(capsys, str(path), "--rounds", "2")
    assert code == 0
    assert "2 of 4 attempts in flight end a round; 2 complete, 2 have not started" in out
    assert "parked                 0 generated tokens between rounds" in out
    assert json.loads(run(capsys, str(path), "--json")[1])["report"]["parked_bytes"] == 0
    # two slots and lengths that end together: the tie completes more than the round needs
    path.write_text(text.replace("slots_per_instance: 1\n", ""))
    code, out, _ = run(capsys, str(path), "--rounds", "2")
    assert code == 0
    assert "2 of 4 attempts in flight end a round; 4 complete\n" in out
