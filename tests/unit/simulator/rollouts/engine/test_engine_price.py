"""Step times against public figures, physical floors and monotonicity."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.simulator.hardware.nodes.types import cluster_of
from flopwright.simulator.rollouts.engine.attention import decode_seconds
from flopwright.simulator.rollouts.engine.build import engine_model
from flopwright.simulator.rollouts.engine.cache import memory, token_bytes
from flopwright.simulator.rollouts.engine.catalog import load_served
from flopwright.simulator.rollouts.engine.imbalance import busiest_share
from flopwright.simulator.rollouts.engine.price import Served, pass_seconds
from flopwright.simulator.rollouts.engine.rows import load, touched_experts
from flopwright.simulator.rollouts.engine.weights import gpu_weight_bytes, model_bytes, num_params
from flopwright.spec.load import load_model
from flopwright.spec.model import GqaAttention
from flopwright.spec.parameters import parameters
from flopwright.spec.rollouts.engine import Speculation, StepTable
from flopwright.spec.rollouts.engine_served import EngineShape, EngineSoftware, served_model

BARE = EngineSoftware(name="bare")


def dense(tp: int = 2) -> Served:
    model = load_served("qwen25_32b")
    return Served(
        model=model, cluster=cluster_of("hgx_h200", tp), shape=EngineShape(tp=tp), software=BARE
    )


def experts(gpus: int = 8) -> Served:
    model = load_served("deepseek_v3", "block_fp8")
    shape = EngineShape(dp=gpus, ep=gpus)
    return Served(model=model, cluster=cluster_of("hgx_h200", gpus), shape=shape, software=BARE)


def step_s(on: Served, batch: float, context: float) -> float:
    return float(pass_seconds(on, load(batch, batch * context)).seconds[0])


@pytest.mark.parametrize(
    ("batch", "context", "milliseconds"),
    [
        (16, 6100, 13.7),
        (16, 18_400, 19.6),
        (16, 51_000, 35.3),
        (64, 6100, 23.5),
        (256, 6100, 62.7),
    ],
)
def test_a_32b_model_on_two_h200_steps_as_the_public_estimator_says(
    batch: int, context: int, milliseconds: float
) -> None:
    """NVIDIA AIConfigurator for Qwen3-32B, TP2, H200 (64 layers, 8 KV heads, as Qwen2.5-32B)."""
    assert step_s(dense(), batch, context) == pytest.approx(milliseconds / 1e3, rel=0.10)


@pytest.mark.parametrize("batch", [1, 16, 256])
def test_no_step_is_faster_than_reading_weights_and_cache(batch: int) -> None:
    on = dense()
    rate = on.cluster.node.gpu.hbm_bytes_per_s
    head = 2 * on.model.vocab_size * on.model.hidden_size / on.shape.tp  # the table is not read
    floor = gpu_weight_bytes(on.model, on.shape) - head + batch * 4096 * token_bytes(on.model, 2)
    assert step_s(on, batch, 4096) > floor / rate


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2", "llama31_70b", "qwen3_235b_a22b"])
def test_matrices_hold_all_but_norms_of_a_catalog_model(name: str) -> None:
    spec = load_model(name)
    assert num_params(served_model(spec)) == pytest.approx(
        sum(p.numel for p in parameters(spec)), rel=2e-5
    )


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("kimi_k3", 2_779_484_476_000),
        ("gpt_oss_120b", 116_829_156_672),
        ("gpt_oss_20b", 20_914_757_184),
    ],
)
def test_served_models_have_their_published_size(name: str, count: int) -> None:
    assert num_params(load_served(name)) == pytest.approx(count, rel=2e-5)


def test_kimi_k3_is_1560_gb_and_its_cache_is_29_gb_at_a_million_tokens() -> None:
    model = load_served("kimi_k3")
    assert model_bytes(model) == pytest.approx(1.560e12, rel=1e-3)
    assert token_bytes(model) * 2**20 == pytest.approx(28.99e9, rel=1e-3)


def test_experts_touched_are_the_expected_distinct_draws() -> None:
    rng = np.random.default_rng(7)
    draws = [
        len(set(np.concatenate([rng.choice(64, 6, replace=False) for _ in range(20)])))
        for _ in range(2000)
    ]
    expected = float(touched_experts(64, 64, 6, 20))
    assert expected == pytest.approx(np.mean(draws), abs=5 * np.std(draws) / np.sqrt(2000))


def test_the_busiest_gpu_is_the_expected_largest_of_normal_loads() -> None:
    rng = np.random.default_rng(3)
    loads = rng.normal(1.0, 0.5 / np.sqrt(32), (20_000, 8)).max(axis=1)
    assert busiest_share(0.5, 32, 8) == pytest.approx(loads.mean(), rel=0.003)
    assert busiest_share(0.5, 32, 1) == 1.0


@settings(max_examples=15, deadline=None)
@given(batch=st.integers(1, 200), more=st.integers(1, 200), context=st.integers(1, 60_000))
def test_more_attempts_or_context_never_make_a_step_shorter(
    batch: int, more: int, context: int
) -> None:
    for on in (dense(), experts()):
        base = step_s(on, batch, context)
        assert step_s(on, batch + more, context) >= base
        assert step_s(on, batch, context + 100 * more) >= base


def test_an_engine_models_table_is_the_priced_step() -> None:
    cluster = cluster_of("hgx_h200", 2)
    engine = engine_model(
        load_served("qwen25_32b"), cluster, EngineShape(tp=2), software=BARE, max_running=256
    )
    priced = step_s(dense(), 64, 20_000)
    assert engine.decode.seconds(64, 64 * 20_000) == pytest.approx(priced, rel=0.01)
    held = memory(dense())
    assert engine.kv_capacity_tokens == held.tokens() // BARE.block_tokens * BARE.block_tokens


def test_groups_of_data_parallel_attention_add_up_to_one_instance() -> None:
    engine = engine_model(
        load_served("deepseek_v3", "block_fp8"), cluster_of("hgx_h200", 8),
        EngineShape(dp=8, ep=8), software=BARE, max_running=512,
    )  # fmt: skip
    assert engine.kv_capacity_tokens == 8 * (memory(experts()).tokens() // 32 * 32)
    assert engine.decode.seconds(512, 512 * 4096.0) == pytest.approx(
        step_s(experts(), 64, 4096), rel=0.02
    )


def test_weights_that_do_not_fit_are_an_error_that_says_so() -> None:
    with pytest.raises(InputError, match="leave no cache"):
        engine_model(load_served("kimi_k2"), cluster_of("hgx_h100", 8), EngineShape(tp=8, ep=8))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_expected_tokens_of_a_speculative_step_are_simulated_ones(acceptance: float) -> None:
    rng = np.random.default_rng(1)
    runs = (rng.random((40_000, 5)) < acceptance).cumprod(axis=1).sum(axis=1) + 1
    expected = Speculation(drafts=5, acceptance=acceptance).tokens_per_step
    assert expected == pytest.approx(runs.mean(), abs=5 * max(runs.std(), 1e-9) / 200 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(attempts=st.integers(1, 64), context=st.integers(0, 100_000), steps=st.integers(1, 50))
def test_steps_of_a_constant_set_are_a_closed_form(
    attempts: int, context: int, steps: int
) -> None:
    table = StepTable(
        batch=(1, 8, 64), base_s=(1e-3, 2e-3, 5e-3), per_context_token_s=(1e-8, 2e-8, 2e-8)
    )
    one_by_one = sum(table.seconds(attempts, context + attempts * j) for j in range(steps))
    assert table.steps_seconds(attempts, context, steps) == pytest.approx(one_by_one)


def test_a_linear_table_is_linear_everywhere() -> None:
    table = StepTable.linear(1e-2, 2e-5, 3e-8)
    for attempts in (1, 2, 3, 1000):
        assert table.seconds(attempts, 500.0 * attempts) == pytest.approx(
            1e-2 + 2e-5 * attempts + 3e-8 * 500 * attempts
        )


@pytest.mark.parametrize(("tile", "milliseconds"), [(128, 15.97), (64, 9.3), (1, 5.10)])
def test_padded_queries_make_decode_attention_of_h20_compute_bound(
    tile: int, milliseconds: float
) -> None:
    """flash-attention issue 1572, H20: 128 sequences of 16,384 tokens, 128 heads over 16, bf16.

    FlashAttention 3 with tiles of 128 and of 64 rows, and FlashInfer, which streams the cache.
    """
    model = load_served("qwen25_72b")
    group = model.layers[0].model_copy(
        update={"attention": GqaAttention(num_heads=128, num_kv_heads=16, head_dim=128)}
    )
    software = EngineSoftware(name="tiled", decode_tile_rows=tile)
    on = Served(
        model=model, cluster=cluster_of("hgx_h20", 1), shape=EngineShape(), software=software
    )
    seconds = float(decode_seconds(on, group, load(128.0, 128.0 * 16_384))[0])
    assert seconds == pytest.approx(milliseconds / 1e3, rel=0.16)


def test_a_wide_part_is_not_slowed_by_padded_queries_and_a_slow_kernel_is_by_its_share() -> None:
    def attention_s(**changed: float) -> float:
        on = replace(dense(), software=BARE.model_copy(update=changed))
        return float(pass_seconds(on, load(64.0, 64.0 * 32_768)).parts["decode_attention"][0])

    assert attention_s(decode_tile_rows=64) == attention_s()
    assert attention_s(decode_share=0.25) == pytest.approx(4 * attention_s(), rel=0.05)


def test_sampling_moves_its_bytes_of_every_logit() -> None:
    few, many = (
        float(
            pass_seconds(
                replace(dense(1), software=BARE.model_copy(update={"logit_bytes": n})),
                load(256.0, 0.0),
            ).parts["memory_bound"][0]
        )
        for n in (8.0, 56.0)
    )
    on = dense(1)
    moved = 48.0 * 256 * on.model.vocab_size
    rate = on.cluster.node.gpu.hbm_bytes_per_s
    assert moved / rate < many - few < 2 * moved / rate
