"""Kimi Linear and Kimi K3: counts, caches, generation from states, stages, balance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flopwright.errors import InputError
from flopwright.models.attention_kda.module import DeltaAttention
from flopwright.models.moe.router import Router
from flopwright.models.optim.muon.cost import head_parts, matrices_of
from flopwright.models.optim.muon.layout import MatrixLayout, matrix_layouts
from flopwright.models.transformer.cost import layer_cost
from flopwright.models.transformer.module import build_stage, init_weights_
from flopwright.ops import Collective, Phase, ShardShape
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.cache import sequence_cache_bytes, sequence_state_bytes
from flopwright.spec.formats import INT4_G32, MXFP4, release_bytes
from flopwright.spec.load import load_model
from flopwright.spec.model import KdaAttention, ModelSpec, Moe
from flopwright.spec.parameters import num_active_params, num_params, parameters

MINIS = ["kimi_linear_mini", "kimi_k3_mini"]
MILLION = 2**20


def test_kimi_k3_has_the_published_parameters() -> None:
    spec = load_model("kimi_k3")
    assert num_params(spec) == 2_779_484_476_000
    assert num_active_params(spec) == 104_189_612_640
    routed = sum(p.numel for p in parameters(spec) if p.role == "expert")
    assert round(routed / 1e9, 1) == 2722.7
    linear = [i for i in range(93) if isinstance(spec.attention_of(i), KdaAttention)]
    assert (len(linear), spec.num_full_attention_layers) == (69, 24)
    assert [i + 1 for i in range(93) if i not in linear] == [*range(4, 93, 4), 93]
    assert spec.residual_sources(spec.num_layers)[0] == 9


def test_kimi_linear_has_the_published_parameters() -> None:
    spec = load_model("kimi_linear_48b_a3b")
    assert round(num_params(spec) / 1e9, 2) == 49.12
    assert round(num_active_params(spec) / 1e9, 2) == 3.11
    assert round(num_active_params(spec, input_embedding=True) / 1e9, 2) == 3.48


def test_caches_at_a_million_tokens() -> None:
    spec = load_model("kimi_k3")
    assert sequence_cache_bytes(spec, 1) == 27_648
    assert round(sequence_cache_bytes(spec, MILLION) / 1e9, 2) == 28.99
    states, convolutions = sequence_state_bytes(spec)
    assert (round(states / 1e6), round(convolutions / 1e6)) == (434, 15)
    assert round(sequence_state_bytes(spec, 2)[0] / 1e6) == 217


def test_release_sizes() -> None:
    assert round(release_bytes(load_model("kimi_k3"), MXFP4) / 1e12, 3) == 1.560
    assert round(release_bytes(load_model("kimi_k2"), INT4_G32) / 1e9, 1) == 594.2


def test_experts_exchange_tokens_of_the_latent_width() -> None:
    cost = layer_cost(load_model("kimi_k3"), 1, ShardShape(seq_len=1, ep=896))
    rows = [
        i for i, n in enumerate(cost.comms.name)
        if n == "mlp.dispatch" and cost.comms.phase[i] == Phase.FORWARD
        and cost.comms.collective[i] == Collective.ALL_TO_ALL
    ]  # fmt: skip
    # One token's sixteen choices; a share of 1 / 896 stays at home.
    assert cost.comms.bytes[rows].sum() == pytest.approx(114_688 * 895 / 896)


@pytest.mark.parametrize("name", MINIS)
def test_generation_from_states_equals_the_whole_sequence(name: str) -> None:
    spec = load_model(name)
    stage = build_stage(spec, range(-1, spec.num_layers + 1), dtype=torch.float64)
    init_weights_(stage, spec, 3)
    stage.eval()
    tokens = torch.randint(spec.vocab_size, (2, 41), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole, cache = stage(tokens), stage.make_cache(2, 64)
        parts = [stage(tokens[:, :20], cache), stage(tokens[:, 20:38], cache)]
        parts += [stage(tokens[:, i : i + 1], cache) for i in range(38, 41)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("cut", [0, 2, 3])
def test_stages_hand_on_all_sums_of_attention_residuals(cut: int) -> None:
    spec = load_model("kimi_k3_mini")
    layers = list(range(-1, spec.num_layers + 1))
    whole = build_stage(spec, layers, dtype=torch.float64)
    parts = [
        build_stage(spec, ls, dtype=torch.float64) for ls in (layers[: cut + 1], layers[cut + 1 :])
    ]
    for stage in (whole, *parts):
        init_weights_(stage, spec, 0)
        for site in (n for n, _ in stage.named_parameters() if "_res_proj" in n):
            torch.nn.init.constant_(stage.get_parameter(site), 0.1)
    tokens = torch.arange(24).view(2, 12)
    expected = whole(tokens)
    found = parts[1](parts[0](tokens))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.sum().backward()
    expected.sum().backward()
    for stage in parts:
        for n, p in stage.named_parameters():
            torch.testing.assert_close(p.grad, whole.get_parameter(n).grad, rtol=1e-9, atol=1e-11)


def test_first_decays_are_slow_and_their_draw_is_the_partitions() -> None:
    spec = load_model("kimi_k3_mini")
    stage = build_stage(spec, [0])
    init_weights_(stage, spec, 5)
    block = stage.model.layers["0"].self_attn
    assert isinstance(block, DeltaAttention)
    assert torch.equal(block.A_log, torch.zeros(4))
    steps = torch.nn.functional.softplus(block.dt_bias)
    assert steps.min() >= 0.001 * (1 - 1e-5)
    assert steps.max() <= 0.1 * (1 + 1e-5)
    again = build_stage(spec, [0, 1])
    init_weights_(again, spec, 5)
    assert torch.equal(again.model.layers["0"].self_attn.dt_bias, block.dt_bias)


# Largest load over the mean, less 1, before the first update and after each of six.
REPORTED_EXCESS = [6.65, 0.31, 0.14, 0.086, 0.055, 0.035, 0.031]


def _skewed_router(balance: str) -> tuple[Router, torch.Tensor]:
    """Returns a router and 4,096 tokens whose choices are as uneven as the reported ones.

    Of those the numbers of tokens, experts (64) and choices (8) are known, not how their scores
    are skewed: here logits have a deviation of 1.5 between tokens and of 2.2 between experts.
    """
    moe = Moe.model_validate(
        {"num_experts": 64, "top_k": 8, "expert_intermediate_size": 8, "balance": balance}
    )
    router = Router(moe, 65, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(4096, 64, generator=generator, dtype=torch.float64)
    skew = torch.randn(64, 1, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(torch.cat((1.5 * torch.eye(64), 2.2 * skew), 1))
    return router, torch.cat((tokens, torch.ones(4096, 1)), 1).float()


def _excess_by_update(
    router: Router, x: torch.Tensor, update: Callable[[torch.Tensor], None]
) -> list[float]:
    """Returns the excess before and after six updates, which are told the histogram."""
    excess = []
    for _ in range(7):
        choices, _ = router(x)
        loads = torch.bincount(choices.flatten(), minlength=64).double()
        excess.append(float(loads.max() / loads.mean() - 1))
        assert router.counts is not None
        assert router.counts.sum() == 4096 * 64
        update(router.counts)
        router.reset_counts()
    return excess


@pytest.mark.slow
def test_quantile_balancing_converges_as_reported() -> None:
    """The same batch again and again; the reported updates are exact quantiles of all its tokens.

    Every step is within half as much again of the reported, as near as the skew can be guessed.
    The router's bins do as much, but for their width: the favourites' scores lie so close to 1
    that many of their tokens share a bin, and the excess stays below 0.1 instead of 0.035.
    """
    router, x = _skewed_router("quantile")
    bias = router.e_score_correction_bias
    assert bias is not None
    scores = torch.sigmoid(x @ router.weight.detach().t())

    def exactly(_: torch.Tensor) -> None:
        alpha = (scores + bias).topk(9).values[:, -1:]
        found = torch.quantile((alpha - scores).t().contiguous().double(), 8 / 64, dim=1)
        bias.copy_(found - found.mean())

    exact = _excess_by_update(router, x, exactly)
    assert exact[0] == pytest.approx(REPORTED_EXCESS[0], rel=0.02)
    for found, reported in zip(exact, REPORTED_EXCESS, strict=True):
        assert reported / 1.5 < found < reported * 1.5
    bias.zero_()
    binned = _excess_by_update(router, x, router.update_quantiles_)
    assert binned == pytest.approx(exact, abs=0.06)


@pytest.mark.slow
def test_the_sign_rule_takes_the_reported_500_steps() -> None:
    """For the excess of 0.06 that quantiles reach in four; a bias moves by 0.001 a step."""
    router, x = _skewed_router("sign")
    bias, excess = router.e_score_correction_bias, []
    assert bias is not None
    scores = torch.sigmoid(x @ router.weight.detach().t())
    for _ in range(501):
        choices = (scores + bias).topk(8).indices
        loads = torch.bincount(choices.flatten(), minlength=64).double()
        excess.append(float(loads.max() / loads.mean() - 1))
        router.update_bias_(loads)
    assert excess[0] == pytest.approx(REPORTED_EXCESS[0], rel=0.02)
    assert min(excess[:400]) > 1
    assert excess[500] < 0.06


def test_quantile_balancing_of_a_router_in_training_and_not() -> None:
    moe = Moe(num_experts=64, top_k=8, expert_intermediate_size=8, balance="quantile")
    router = Router(moe, 32, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.normal_(generator=generator).mul_(0.25)
        router.weight[:16] += 0.1
    x = torch.randn(4096, 32, generator=generator) + 0.2
    excess = _excess_by_update(router, x, router.update_quantiles_)
    assert excess[0] > 1.5
    assert excess[1] < 0.35
    assert excess[6] < 0.05
    router.eval()  # frozen at inference
    before = router.e_score_correction_bias
    assert before is not None
    kept = before.clone()
    with torch.no_grad():
        router(x)
    assert router.counts is None
    assert torch.equal(before, kept)


@pytest.mark.parametrize(
    "change",
    [
        {"full_attention_layers": None},
        {"full_attention_layers": [3, 9]},
        {"full_attention_layers": [3, 3]},
        {"full_attention_layers": []},
        {"attn_res_block": 0},
        {"mlp": {"kind": "situ_glu", "intermediate_size": 8}},
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, object]) -> None:
    data = load_model("kimi_linear_mini").to_data() | change
    with pytest.raises(ValueError, match=r"."):
        ModelSpec.model_validate(data)


@pytest.mark.parametrize("name", ["kimi_k3", "kimi_linear_48b_a3b"])
def test_shrunk_models_keep_their_kinds_of_blocks(name: str) -> None:
    spec = load_model(name).shrunk(hidden_size=128, num_layers=8)
    kinds = [spec.attention_of(i).kind for i in range(8)]
    assert kinds == ["kda", "kda", "kda", "mla"] * 2
    assert (spec.attn_res_block is None) == (name != "kimi_k3")
    assert ModelSpec.model_validate(spec.to_data()) == spec
    stage = build_stage(spec, range(-1, 9), device="meta")
    held = {n: tuple(t.shape) for n, t in (*stage.named_parameters(), *stage.named_buffers())}
    assert held == {p.name: p.shape for p in parameters(spec)}


def test_megatron_refuses_kimi_k3_by_name() -> None:
    from flopwright.planner.export.megatron import megatron_file
    from flopwright.spec.load import load_cluster, make_plan_file
    from flopwright.spec.scenario import Scenario
    from flopwright.spec.workload import Workload

    workload = Workload(seq_len=4096, global_batch_size=64, total_tokens=10**9)
    scenario = Scenario(
        name="t", model=load_model("kimi_k3_mini"), cluster=load_cluster("64_h100"),
        workload=workload,
    )  # fmt: skip
    plan = make_plan_file(scenario, ParallelPlan(dp_shard=64), "t")
    with pytest.raises(InputError) as refused:
        megatron_file(plan)
    assert {v.field for v in refused.value.violations} >= {
        "model.linear_attention", "model.attn_res_block", "model.moe.latent_size",
    }  # fmt: skip


def test_per_head_muon_takes_each_heads_rows_by_themselves() -> None:
    spec = load_model("kimi_k3")
    plan = ParallelPlan(tp=8, dp_shard=8)
    layouts = matrix_layouts(spec, plan, per_head=True)
    by_layer = {n.removeprefix("model.layers."): layouts[n] for n in layouts}
    assert by_layer["0.self_attn.q_proj.weight"] == MatrixLayout(parts=12)
    assert by_layer["3.self_attn.q_b_proj.weight"] == MatrixLayout(parts=12)
    assert by_layer["3.self_attn.kv_b_proj.weight"] == MatrixLayout(parts=24)
    assert by_layer["3.self_attn.q_a_proj.weight"] == MatrixLayout(parts=1)
    assert by_layer["3.self_attn.o_proj.weight"] == MatrixLayout(axis="tp", dim=1)
    whole = matrix_layouts(spec, plan)
    assert whole["model.layers.0.self_attn.q_proj.weight"] == MatrixLayout(axis="tp", dim=0)
    query = next(p for p in parameters(spec) if p.name.endswith("3.self_attn.q_b_proj.weight"))
    found = matrices_of(query, head_parts(spec, query))
    assert (found.rows, found.columns, found.count) == (192, 1536, 96)


def test_generation_with_sinks_and_windows_in_every_other_layer() -> None:
    data = load_model("llama_mini").to_data()
    data["attention"] |= {"sinks": True, "sliding_window": 7, "full_every": 2}
    spec = ModelSpec.model_validate(data)
    assert [spec.sliding_window(i) for i in range(4)] == [7, None, 7, None]
    stage = build_stage(spec, range(-1, spec.num_layers + 1), dtype=torch.float64)
    init_weights_(stage, spec, 3)
    for name, p in stage.named_parameters():
        if name.endswith(".sinks"):
            torch.nn.init.normal_(p)
    stage.eval()
    tokens = torch.randint(spec.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole, cache = stage(tokens), stage.make_cache(2, 32)
        parts = [stage(tokens[:, :10], cache), stage(tokens[:, 10:22], cache)]
        parts += [stage(tokens[:, i : i + 1], cache) for i in (22, 23)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-11)
