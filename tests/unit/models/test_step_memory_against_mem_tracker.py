"""A whole training step's bytes by class: priced against torch's MemTracker, which knows nothing
of any cost.py.

The tracker counts what operators return, by storage. "Activations" are what stands after the
forward pass, "temporaries" what the fullest moment has beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from flopwright.models.optim.adamw.module import build_optimizer
from flopwright.models.saving import Saver, SavingPolicy
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.plan.parallel import SELECTIVE_TAGS, ParallelPlan
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.load import load_model, load_scenario
from flopwright.spec.model import GqaAttention, Mlp, ModelSpec, Moe
from flopwright.spec.parameters import EMBEDDING_LAYER
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Precision

pytestmark = pytest.mark.slow

SCENARIO = load_scenario("kimi_k2_mini_2cpu_fp32")
CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BATCH, SEQ = 4, 64


def _spec(**changes: Any) -> ModelSpec:
    data: dict[str, Any] = {
        "name": "small",
        "hidden_size": 64,
        "num_layers": 3,
        "vocab_size": 512,
        "attention": GqaAttention(num_heads=4, num_kv_heads=2, head_dim=16),
        "mlp": Mlp(intermediate_size=192),
    }
    return ModelSpec(**(data | changes))


GPT = _spec(
    positions="learned", max_seq_len=SEQ, tied_embeddings=True, norm="layer_norm",
    mlp=Mlp(kind="gelu", intermediate_size=256, bias=True),
    attention=GqaAttention(
        num_heads=4, num_kv_heads=4, head_dim=16, rope=None, bias=True, o_bias=True
    ),
)  # fmt: skip
MOE = Moe(num_experts=8, top_k=3, expert_intermediate_size=48, router="softmax")
SPECS = {
    "mla_moe": load_model("kimi_k2_mini").model_copy(update={"num_layers": 3}),
    "gqa": _spec(),
    "gqa_small_vocabulary": _spec(vocab_size=32),
    "gqa_wide": _spec(hidden_size=384, mlp=Mlp(intermediate_size=768)),
    "gpt": GPT,
    "gpt_small_vocabulary": GPT.model_copy(update={"vocab_size": 32}),
    "moe_small_vocabulary": _spec(vocab_size=32, moe=MOE),
    "moe_balance_loss": _spec(
        vocab_size=32,
        moe=MOE.model_copy(update={"num_shared_experts": 2, "sequence_balance_loss": 0.01}),
    ),
    "moe_few_tokens_an_expert": _spec(
        vocab_size=32,
        moe=MOE.model_copy(update={"num_experts": 64, "expert_intermediate_size": 96}),
    ),
}


def _scenario(spec: ModelSpec, dtype: str, batch: int) -> Scenario:
    precision = Precision(
        compute=dtype, weights=dtype, gradients=dtype, master_weights="none",
        optimizer_state=dtype,
    )  # fmt: skip
    workload = SCENARIO.workload.model_copy(
        update={"seq_len": SEQ, "global_batch_size": batch, "precision": precision}
    )
    return SCENARIO.model_copy(update={"model": spec, "workload": workload})


def _priced(
    spec: ModelSpec, dtype: str, plan: ParallelPlan, batch: int = BATCH, stage: int = 0
) -> dict[str, float]:
    found = evaluate(_scenario(spec, dtype, batch), Candidates.from_plans([plan]))
    return {name: values[stage, 0] for name, values in found.memory_bytes.items()}


def _stage(spec: ModelSpec, dtype: str, layers: range) -> tuple[Stage, torch.optim.AdamW]:
    """Returns a stage and its optimizer, both past a first step: every state is there."""
    stage = build_stage(spec, layers, dtype=DTYPES[dtype])
    init_weights_(stage, spec, 0)
    optimizer = build_optimizer(stage, SCENARIO.workload.optimizer, 1e-3)
    for p in stage.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return stage.train(), optimizer


def _tokens(spec: ModelSpec) -> Tensor:
    return torch.randint(spec.vocab_size, (BATCH, SEQ))


def _bytes(tracker: MemTracker, when: str = "current") -> dict[str, int]:
    snapshot = tracker.get_tracker_snapshot(when)[CPU]
    counted = {getattr(k, "value", k): v for k, v in snapshot.items()}
    counted["Total"] -= counted["Other"]  # the angle tables, which all steps share
    return counted


def _states(counted: dict[str, int]) -> dict[str, int]:
    return {
        "weights": counted["Parameter"] + counted["Buffer"],
        "gradients": counted["Gradient"],
        "optimizer_state": counted["Optstate"],
    }


def _tracker(stage: Stage, optimizer: torch.optim.Optimizer) -> MemTracker:
    """Returns a tracker that knows what stood before the step, angle tables among it."""
    if stage.rotary is not None:
        stage.rotary(SEQ, next(stage.parameters()))
    tracker = MemTracker()
    tracker.track_external(stage, optimizer, *stage.constants())
    return tracker


def _track(spec: ModelSpec, dtype: str, forward: Callable[[Stage, Tensor], Tensor]) -> Any:
    """Runs a step and returns (bytes after the forward, at the peak, at the end)."""
    stage, optimizer = _stage(spec, dtype, range(EMBEDDING_LAYER, spec.num_layers + 1))
    tracker = _tracker(stage, optimizer)
    with tracker:
        value = loss(forward(stage, _tokens(spec)), _tokens(spec))
        after = _bytes(tracker)
        value.backward()
        optimizer.step()
        peak = _bytes(tracker, "peak")
        del value
    return after, peak, _bytes(tracker)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_every_class_of_a_step(name: str, dtype: str) -> None:
    spec = SPECS[name]
    after, peak, end = _track(spec, dtype, lambda stage, tokens: stage(tokens))
    priced = _priced(spec, dtype, ParallelPlan(micro_batch_size=BATCH))
    _same_classes(priced, after, peak, end)


def _same_classes(
    priced: dict[str, float],
    after: dict[str, int],
    peak: dict[str, int],
    end: dict[str, int],
    more: float = 0.0,
) -> None:
    """Holds each class to 1 %; temporaries may be up to `more` bytes above, never below."""
    for snapshot in (after, peak, end):
        for cls, nbytes in _states(snapshot).items():
            assert priced[cls] == pytest.approx(nbytes, rel=0.01), cls
    assert priced["activations"] == pytest.approx(after["Activation"], rel=0.01)
    temporaries = peak["Total"] - after["Total"]
    assert 0.99 * temporaries <= priced["temporaries"] <= 1.01 * temporaries + more
    tensors = sum(v for k, v in priced.items() if k != "reserved")
    assert tensors == pytest.approx(peak["Total"], rel=0.01)


def _checkpointed(stage: Stage, tokens: Tensor) -> Tensor:
    x = stage.embed(tokens)
    for block in stage.blocks():
        x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    return stage.head(x)


def _regions(policy: SavingPolicy) -> Callable[[Stage, Tensor], Tensor]:
    def forward(stage: Stage, tokens: Tensor) -> Tensor:
        with Saver(policy).forward():
            return stage(tokens)

    return forward


@pytest.mark.parametrize("by", [_checkpointed, _regions(SavingPolicy(recompute="full"))])
@pytest.mark.parametrize(
    "name", ["mla_moe", "gqa", "gqa_small_vocabulary", "gpt_small_vocabulary"]
)
def test_peak_of_a_step_with_full_recompute(
    name: str, by: Callable[[Stage, Tensor], Tensor]
) -> None:
    spec = SPECS[name]
    after, peak, _ = _track(spec, "fp32", by)
    priced = _priced(spec, "fp32", ParallelPlan(micro_batch_size=BATCH, recompute="full"))
    assert priced["activations"] == pytest.approx(after["Activation"], rel=0.01)
    tensors = sum(v for k, v in priced.items() if k != "reserved")
    assert tensors == pytest.approx(peak["Total"], rel=0.01)


KIMI = ("norm", "swiglu", "mla_up", "moe_down")


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        *[(name, tags) for name in ("mla_moe", "gqa") for tags in ((), ("swiglu",), KIMI)],
        ("gqa_small_vocabulary", ("swiglu",)),
    ],
)
def test_peak_of_a_step_with_selective_recompute(name: str, tags: tuple[str, ...]) -> None:
    spec = SPECS[name]
    policy = SavingPolicy(recompute="selective", groups=frozenset(tags) or SELECTIVE_TAGS)
    after, peak, _ = _track(spec, "fp32", _regions(policy))
    plan = ParallelPlan(micro_batch_size=BATCH, recompute="selective", recompute_tags=tags)
    priced = _priced(spec, "fp32", plan)
    assert priced["activations"] == pytest.approx(after["Activation"], rel=0.01)
    tensors = sum(v for k, v in priced.items() if k != "reserved")
    assert tensors == pytest.approx(peak["Total"], rel=0.01)


@pytest.mark.parametrize("name", ["mla_moe", "gqa", "gpt", "moe_balance_loss"])
def test_first_stage_of_a_pipeline(name: str) -> None:
    """Two micro-batches forward, then backward: no head, the gradient comes from outside."""
    spec = SPECS[name]
    plan = ParallelPlan(pp=2, micro_batch_size=BATCH, layers_per_stage=(2, spec.num_layers - 2))
    stage, optimizer = _stage(spec, "fp32", range(EMBEDDING_LAYER, 2))
    tracker = _tracker(stage, optimizer)
    with tracker:
        edges = []
        for _ in range(2):
            tracker.reset_mod_stats()  # a second call would be a second step to it
            out = stage(_tokens(spec))
            edges.append((torch.autograd.graph.get_gradient_edge(out), out.shape))
            del out
        after = _bytes(tracker)
        for edge, shape in edges:
            torch.autograd.backward((edge,), (torch.ones(shape),))
        peak = _bytes(tracker, "peak")
    priced = _priced(spec, "fp32", plan, 2 * BATCH)
    # The sent output is gone, and so is the input of the layer after it: the next stage's.
    assert priced["activations"] == pytest.approx(after["Activation"], rel=0.01)
    for cls, nbytes in _states(peak).items():
        assert priced[cls] == pytest.approx(nbytes, rel=0.01), cls
    tensors = sum(v for k, v in priced.items() if k != "reserved")
    assert tensors == pytest.approx(peak["Total"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kimi_k3_mini", "kimi_linear_mini"])
@pytest.mark.parametrize(
    "policy",
    [
        SavingPolicy(),
        SavingPolicy(recompute="full"),
        SavingPolicy(recompute="selective", groups=SELECTIVE_TAGS),
        SavingPolicy(recompute="selective", groups=frozenset({"core_attn"})),
    ],
    ids=["none", "full", "selective", "core"],
)
def test_every_class_of_kimi_linear_and_k3_under_every_policy(
    policy: SavingPolicy, name: str
) -> None:
    """Where norms are made again temporaries are priced as if up to two inputs more stood then."""
    spec = load_model(name)
    assert spec.moe is not None
    # The histograms of quantile balancing, one for all micro-batches, are no activations.
    spec = spec.model_copy(update={"moe": spec.moe.model_copy(update={"balance": "sign"})})
    after, peak, end = _track(spec, "fp32", _regions(policy))
    own = policy.groups if policy.groups != SELECTIVE_TAGS else frozenset()
    plan = ParallelPlan(
        micro_batch_size=BATCH, recompute=policy.recompute, recompute_tags=tuple(own)
    )
    again = policy.recompute == "full" or "norm" in policy.groups
    inputs = 2 * 4 * BATCH * SEQ * spec.hidden_size if again else 0
    _same_classes(_priced(spec, "fp32", plan), after, peak, end, more=inputs)
