"""GPUs that hold a model, and what serving on them costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flopwright.cli import app
from flopwright.planner.serving.holds import (
    fewest_for_weights,
    fewest_gpus,
    gpus_for_weights,
    holdings,
)
from flopwright.planner.serving.serve import Asked, serve
from flopwright.simulator.hardware.nodes.types import node_type
from flopwright.simulator.rollouts.engine.catalog import load_served
from flopwright.simulator.rollouts.engine.software import engine_software
from flopwright.simulator.rollouts.engine.weights import model_bytes

VLLM = engine_software("vllm")
LONG = 131_072


def test_k2_in_fp8_needs_thirteen_80_gb_gpus_for_its_weights_alone() -> None:
    model = load_served("kimi_k2", "block_fp8")
    assert gpus_for_weights(model_bytes(model), 80e9) == 13
    assert fewest_for_weights(model, node_type("hgx_h100").node.gpu) == 13


def test_sixteen_h200_hold_k2_in_fp8_with_128k_of_context() -> None:
    found = fewest_gpus(load_served("kimi_k2", "block_fp8"), "hgx_h200", VLLM, LONG)
    assert found[0].gpus == 16


def test_eight_h200_hold_k2_in_int4() -> None:
    found = fewest_gpus(load_served("kimi_k2", "int4_g32"), "hgx_h200", VLLM, LONG)
    assert found[0].gpus == 8


@pytest.mark.parametrize(
    ("node", "gpus", "fits"),
    [
        ("hgx_b300", 8, True),
        ("gb200_nvl72", 16, True),
        ("hgx_h200", 8, False),
        ("hgx_h200", 16, True),
    ],
)
def test_where_k3_in_mxfp4_fits(node: str, gpus: int, fits: bool) -> None:
    assert bool(holdings(load_served("kimi_k3"), node, VLLM, gpus, LONG)) is fits


def test_nine_k3_experts_need_nine_times_the_memory_of_one_student() -> None:
    model = load_served("kimi_k3")
    one = serve(model, Asked(node_type="hgx_b300", concurrency=9))
    nine = serve(model, Asked(node_type="hgx_b300", concurrency=9, models=9))
    assert nine.weight_bytes == 9 * one.weight_bytes == pytest.approx(9 * 1.560e12, rel=1e-3)
    assert nine.gpus_for_weights == 9 * one.gpus_for_weights
    assert nine.gpus >= 9 * 8 > one.gpus


def test_more_concurrency_or_context_never_needs_fewer_gpus() -> None:
    model = load_served("llama31_70b", "fp8")
    counts = [
        fewest_gpus(model, "hgx_h100", VLLM, context, users)[0].gpus
        for context, users in ((4096, 1), (4096, 64), (LONG, 64))
    ]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_money_is_gpu_time() -> None:
    found = serve(
        load_served("llama31_70b", "fp8"),
        Asked(node_type="hgx_h200", context=8192, concurrency=64, usd_per_gpu_hour=3.6,
              efforts={"low": 1000, "high": 10_000}),
    )  # fmt: skip
    assert found.usd_per_million_tokens == pytest.approx(1e6 * 1e-3 / found.tokens_per_s_per_gpu)
    extra = found.usd_per_task["high"] - found.usd_per_task["low"]
    assert extra == pytest.approx(9000 * found.usd_per_million_tokens / 1e6)
    assert found.tokens_per_s_per_gpu * found.gpus == pytest.approx(
        64 * found.tokens_per_s_per_user
    )


def test_int4_of_a_dense_model_takes_its_blocks_and_of_experts_those_alone() -> None:
    dense, int4 = (load_served("llama31_8b", release) for release in (None, "int4_g32"))
    assert int4.weights_text() == "attention int4_g32, mlp int4_g32, others bf16"
    # 4 bits and a 16-bit scale of 32 for 16: the embedding and the head stay.
    outside = 2 * 2 * 128_256 * 4096
    share = (model_bytes(int4) - outside) / (model_bytes(dense) - outside)
    assert share == pytest.approx(4.5 / 16, rel=1e-3)
    experts = load_served("kimi_k2", "int4_g32")
    assert experts.weights_text() == "expert int4_g32, others bf16"


def test_the_command_answers_in_text_and_json() -> None:
    args = ["recommend", "--serve", "kimi_k2", "--release", "block_fp8", "--price", "3"]
    shown = CliRunner().invoke(app, args)
    assert shown.exit_code == 0, shown.output
    assert "With caches: 16 GPUs" in shown.output
    data = json.loads(CliRunner().invoke(app, [*args, "--json"]).output)
    assert data["gpus"] == 16
    assert set(data["usd_per_task"]) == {"low", "high", "max"}


@pytest.mark.parametrize(
    "args",
    [
        ["--serve", "kimi_k2", "--release", "fp3"],
        ["--serve", "no_such_model"],
        ["--serve", "kimi_k2", "--effort", "high"],
        ["--serve", "kimi_k2", "--node", "hgx_h201"],
        ["--serve", "kimi_k2", "--context", "many"],
        ["kimi_k2_pretrain_2048gpu_h800_bf16", "--serve", "kimi_k2"],
        [],
    ],
)
def test_what_cannot_be_asked_is_refused(args: list[str]) -> None:
    from flopwright.errors import InputError

    result = CliRunner().invoke(app, ["recommend", *args])
    assert result.exit_code == 2 or isinstance(result.exception, InputError), result.output


def test_a_model_that_nothing_holds_has_exit_code_one() -> None:
    found = serve(load_served("kimi_k3"), Asked(node_type="hgx_h100", max_gpus=8))
    assert found.gpus == 0
    assert found.usd_per_million_tokens is None


def test_the_commands_of_the_page_run() -> None:
    page = (Path(__file__).parents[4] / "docs" / "serving.md").read_text()
    commands = [
        line.split()[1:] for line in page.splitlines() if line.startswith("flopwright recommend")
    ]
    assert len(commands) >= 4
    for command in commands:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, f"{command}: {result.output}"
