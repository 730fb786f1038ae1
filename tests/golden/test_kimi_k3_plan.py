"""Kimi K3's pre-training on 16,384 H100s: a plan of it fits, its weights as counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flopwright.cli import app

NAME = "kimi_k3_pretrain_16384gpu_h100_bf16"
PP, EP = 32, 64
# One layout and one way to save memory: docs/models.md has the same line.
FIXED = (
    f"--pp {PP} --vpp 1 --ep {EP} --tp 1 --cp 1 --zero 1 --recompute full --schedule 1f1b"
    " --no-fp8-activations --no-activation-offload --no-optimizer-offload"
)
ROUTED = 92 * 896 * 3 * 3584 * 3072
REST = 2_779_484_476_000 - ROUTED


@pytest.mark.slow
def test_a_plan_of_the_pretraining_fits() -> None:
    command = ["plan", NAME, *FIXED.split(), "--no-refine", "--top", "1", "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)["result"]
    assert result["verdict"] == "fits"
    assert result["proved"]
    (best,) = result["ranked"]
    plan, metrics = best["plan"], best["prediction"]["metrics"]
    assert (plan["pp"], plan["ep"], plan["tp"]) == (PP, EP, 1)
    stages = metrics["memory_bytes"]
    assert len(stages) == PP
    assert max(sum(s.values()) for s in stages) < 80 * 2**30
    weights = sum(s["weights"] for s in stages) / PP
    assert weights == pytest.approx(2 * (ROUTED / EP + REST) / PP, rel=0.01)
    # Six FLOPs an active weight and token, at the peak of every GPU.
    least_s = 6 * 104e9 * 16384 * 8192 / (16384 * 989e12)
    assert least_s < metrics["step_time_s"] < 10 * least_s


def test_the_page_of_the_models_names_the_command() -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    said = " ".join(page.read_text().replace("\\\n", " ").split())
    assert f"flopwright plan {NAME} {FIXED}" in said
