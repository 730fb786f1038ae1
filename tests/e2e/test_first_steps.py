"""docs/first_steps.md does what it says: its own commands are run and their results checked."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flopwright.executor.checkpoint.load import load_full
from flopwright.spec.load import load_model
from flopwright.spec.parameters import num_params

ROOT = Path(__file__).parents[2]
SENTENCE = (ROOT / "scenarios" / "first_steps.txt").read_text()


def documented_commands():
    text = (ROOT / "docs" / "first_steps.md").read_text()
    (block,) = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    return [shlex.split(line) for line in block.splitlines()]


def test_the_model_is_one_layer_of_about_ten_thousand_weights():
    model = load_model("first_steps")
    assert model.num_layers == 1
    assert 9_000 <= num_params(model) <= 11_000
    assert model.vocab_size == len(set(SENTENCE))
    assert f"{num_params(model):,} weights" in (ROOT / "docs" / "first_steps.md").read_text()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder in which the three documented commands were run, and what the last one wrote."""
    folder = tmp_path_factory.mktemp("first_steps")
    (folder / "scenarios").mkdir()
    shutil.copy(ROOT / "scenarios" / "first_steps.txt", folder / "scenarios")
    environment = os.environ | {
        "FLOPWRIGHT_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    output = ""
    for program, *arguments in documented_commands():
        assert program == "flopwright"
        done = subprocess.run(
            [sys.executable, "-m", "flopwright", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        output = done.stdout
    return folder, output


@pytest.mark.slow
def test_the_sentence_comes_back(workplace):
    _, output = workplace
    assert output == SENTENCE


@pytest.mark.slow
def test_the_loss_falls_from_three_to_a_tenth(workplace):
    folder, _ = workplace
    measurement = json.loads((folder / "runs/first/measurement-first.json").read_text())
    losses = measurement["losses"]
    assert len(losses) == 300
    assert losses[0] == pytest.approx(math.log(22), abs=0.4)
    assert sum(losses[-20:]) / 20 < 0.1
    assert measurement["held_out_loss"] < 0.1


@pytest.mark.slow
def test_the_checkpoint_is_whole_and_names_its_tokenizer(workplace):
    folder, _ = workplace
    tensors, manifest = load_full(folder / "runs/first/checkpoint-first")
    assert sum(t.numel() for t in tensors.values()) == num_params(load_model("first_steps"))
    assert manifest.step == 300
    meta = json.loads((folder / "runs/first/data/meta.json").read_text())
    assert manifest.tokenizer_hash == meta["tokenizer_hash"]
    assert meta["split_rule"] == "train"
