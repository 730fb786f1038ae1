"""What each recompute policy and FP8 storage keep and run again: cost rows against the modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from flopwright.models.saving import Saver, SavingPolicy
from flopwright.models.transformer.cost import layer_cost
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.ops import BlockCost, ShardShape
from flopwright.plan.parallel import RECOMPUTE_TAGS, SELECTIVE_TAGS
from flopwright.simulator.memory.stages import FP8_BYTES_PER_NUMBER
from flopwright.simulator.training.layers import kind_of
from flopwright.simulator.training.recompute import Policy, kept, run_again
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.load import load_model
from flopwright.spec.model import GqaAttention, Indexer, MlaAttention, Mlp, ModelSpec, Moe

pytestmark = pytest.mark.slow

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
SHAPE = (2, 16)
MLA = MlaAttention(
    num_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=5,
)  # fmt: skip


def _spec(**changes: Any) -> ModelSpec:
    data: dict[str, Any] = {
        "name": "small", "hidden_size": 128, "num_layers": 2, "vocab_size": 41,
        "attention": MLA, "mlp": Mlp(intermediate_size=256),
    }  # fmt: skip
    return ModelSpec(**(data | changes))


GQA = GqaAttention(num_heads=4, num_kv_heads=2, head_dim=6)
MOE = Moe(
    num_experts=6, top_k=3, expert_intermediate_size=128, first_dense_layers=1,
    num_shared_experts=1,
)  # fmt: skip
SPECS = {
    "mla_moe": _spec(moe=MOE),
    "mla_without_q_lora": _spec(attention=MLA.model_copy(update={"q_lora_rank": None})),
    "gqa_mlp": _spec(attention=GQA),
    "gqa_norm": _spec(attention=GQA.model_copy(update={"qk_norm": True})),
    "gqa_norm_without_rope": _spec(
        attention=GQA.model_copy(update={"qk_norm": True, "rope": None})
    ),
    "gqa_gelu_layer_norm": _spec(
        attention=GQA, norm="layer_norm", mlp=Mlp(kind="gelu", intermediate_size=256, bias=True)
    ),
    "moe_balance": _spec(
        moe=MOE.model_copy(update={"router": "softmax", "sequence_balance_loss": 0.01})
    ),
}
# Blocks whose rows are not told apart by name below.
SPARSE = {
    "sparse": _spec(
        attention=MLA.model_copy(
            update={"indexer": Indexer(num_heads=3, head_dim=6, top_k=5), "output_gate": True}
        )
    ),
    "sparse_whole": _spec(
        attention=MLA.model_copy(update={"indexer": Indexer(num_heads=3, head_dim=6, top_k=16)})
    ),
}
LISTS = {
    **{tag: {tag} for tag in RECOMPUTE_TAGS},
    "selective": set(SELECTIVE_TAGS),
    "kimi": {*SELECTIVE_TAGS, "moe_down"},
    "all": set(RECOMPUTE_TAGS),
    "inner": {*SELECTIVE_TAGS, "core_attn", "moe_down"},
}
POLICIES = {
    "none": SavingPolicy(),
    "full": SavingPolicy(recompute="full"),
    **{k: SavingPolicy(recompute="selective", groups=frozenset(v)) for k, v in LISTS.items()},
}


class Living(TorchDispatchMode):
    """Knows the memory of every tensor that an operator has returned while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                ref = StorageWeakRef(t.untyped_storage())
                self._seen[ref.cdata] = (ref, t.untyped_storage().nbytes())
        return out

    def nbytes(self, without: Iterable[Tensor]) -> int:
        left_out = {t.untyped_storage()._cdata for t in without}
        return sum(
            nbytes
            for address, (ref, nbytes) in self._seen.items()
            if not ref.expired() and address not in left_out
        )


class Calls(TorchDispatchMode):
    """Counts calls of our ops and of sums by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        space, name = func._schema.name.split("::")
        if name.startswith("add_rms_norm"):  # a sum and a norm or its way back, counted apart
            self.names.update(("add", name.removeprefix("add_")))
        elif space == "flopwright" or name in {"add", "gelu"}:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def _stage(spec: ModelSpec, layers: Iterable[int], dtype: str, device: str = "cpu") -> Stage:
    stage = build_stage(spec, layers, dtype=DTYPES[dtype], device=device)
    if device == "cpu":
        init_weights_(stage, spec, 0)
    return stage.train()


def _forward(
    stage: Stage, spec: ModelSpec, dtype: str, shape: tuple[int, int], device: str = "cpu"
) -> tuple[GradientEdge, Tensor]:
    """Returns the graph's end and the gradient to begin with; nothing else holds anything."""
    torch.manual_seed(0)
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    if device == "cpu":
        tokens.random_(spec.vocab_size)
    if stage.has_embedding:
        out = stage(tokens)
    else:
        x = torch.randn(*shape, spec.hidden_size, dtype=DTYPES[dtype], device=device)
        out = stage(x.requires_grad_())
    if stage.has_head:
        out = loss(out, tokens.clone())  # two storages, as a batch has them
    return get_gradient_edge(out), torch.ones_like(out)


def _saving(policy: SavingPolicy | None, **more: Any) -> Any:
    return nullcontext() if policy is None else Saver(policy, **more).forward()


def _kind(cost: BlockCost, policy: SavingPolicy, kind: str) -> Policy:
    del cost
    return Policy(policy.recompute, policy.groups).of(kind)


def _kept_bytes(cost: BlockCost, policy: SavingPolicy, kind: str, dtype: str) -> float:
    """Returns what the rows say that is kept."""
    priced = _kind(cost, policy, kind)
    if priced.name == "full":
        return float(cost.lives.bytes[cost.lives.name.index("input"), 0])
    stays = cost.lives.bytes[:, 0] * kept(cost, priced, kind)
    width = DTYPE_BYTES[dtype]
    narrow = FP8_BYTES_PER_NUMBER / width if policy.fp8 else 1.0
    return float(np.where(cost.lives.fp8, stays * narrow, stays).sum())


def _measured_bytes(
    spec: ModelSpec, layer: int, policy: SavingPolicy, dtype: str, shape: tuple[int, int],
    device: str = "cpu",
) -> int:  # fmt: skip
    stage = _stage(spec, [layer], dtype, device)
    if stage.rotary is not None:
        stage.rotary(shape[1], next(stage.parameters()))
    watched: Counter[int] = Counter()

    class Watched:
        def __init__(self, t: Tensor) -> None:
            self.nbytes = t.untyped_storage().nbytes()
            watched[0] += self.nbytes

        def __del__(self) -> None:
            watched[0] -= self.nbytes

    with Living() as living, _saving(policy, watch=Watched):
        edge, gradient = _forward(stage, spec, dtype, shape, device)
    for block in stage.moe_blocks().values():  # what a block shows of its last pass
        block.last_choices = block.last_loads = block.loads = None
    outside = [*stage.parameters(), *stage.buffers(), *stage.constants(), gradient]
    found = living.nbytes(outside)
    # What the meter of a run is told; it leaves out derived tables itself.
    tables = sum(t.untyped_storage().nbytes() for t in stage.constants())
    assert watched[0] in {found, found + tables}
    del edge
    return found


# A plan cannot ask for FP8 storage where everything runs again: nothing is left to narrow.
STORED = [(policy, fp8) for policy in POLICIES for fp8 in (False, True) if not (
    fp8 and policy == "full")]  # fmt: skip


@pytest.mark.parametrize(("policy", "fp8"), STORED)
@pytest.mark.parametrize("name", SPECS)
def test_kept_bytes(name: str, policy: str, fp8: bool) -> None:
    spec, dtype = SPECS[name], "fp32"
    saving = SavingPolicy(
        recompute=POLICIES[policy].recompute, groups=POLICIES[policy].groups, fp8=fp8
    )
    for layer in range(-1, spec.num_layers + 1):
        cost = layer_cost(spec, layer, ShardShape(micro_batch_size=2, seq_len=16, dtype=dtype))
        priced = _kept_bytes(cost, saving, kind_of(spec, layer), dtype)
        assert _measured_bytes(spec, layer, saving, dtype, SHAPE) == priced, layer


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SPARSE)
def test_kept_bytes_of_sparse_attention(name: str, policy: str) -> None:
    spec, saving = SPARSE[name], POLICIES[policy]
    cost = layer_cost(spec, 0, ShardShape(micro_batch_size=2, seq_len=16, dtype="bf16"))
    priced = _kept_bytes(cost, saving, kind_of(spec, 0), "bf16")
    assert _measured_bytes(spec, 0, saving, "bf16", SHAPE) == priced


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layer", [0, 1])
def test_kept_bytes_at_k2_shapes(layer: int, policy: str) -> None:
    spec, dtype, shape = load_model("kimi_k2"), "bf16", (1, 4096)
    fp8 = POLICIES[policy].recompute != "full"
    saving = SavingPolicy(
        recompute=POLICIES[policy].recompute, groups=POLICIES[policy].groups, fp8=fp8
    )
    cost = layer_cost(spec, layer, ShardShape(micro_batch_size=1, seq_len=4096, dtype=dtype))
    priced = _kept_bytes(cost, saving, kind_of(spec, layer), dtype)
    assert _measured_bytes(spec, layer, saving, dtype, shape, "meta") == priced


# Which of our ops a forward row is, by the end of its name; rows without an op are left out.
OPS = {
    "kv_a_proj_with_mqa": "linear",
    "layernorm": "rms_norm", "norm": "rms_norm", "proj": "linear", "gate": "linear",
    "lm_head": "linear", "rope": "rope", "kv_rope": "mla_key_value", "attention": "attention",
    "swiglu": "swiglu", "experts.swiglu": "swiglu_packed", "gelu": "gelu", "route": "route",
    "permute": "permute", "unpermute": "unpermute", "experts.gate_up_proj": "grouped_gemm",
    "experts.down_proj": "grouped_gemm", "residual": "add", "shared_sum": "add",
    "shared_experts.swiglu": "swiglu", "shared_experts.gate_proj": "linear",
    "shared_experts.up_proj": "linear", "shared_experts.down_proj": "linear", "loss":
    "cross_entropy", "embed_tokens": "embedding",
}  # fmt: skip


def _op_of(row: str, spec: ModelSpec) -> str | None:
    if row.endswith(".regroup"):  # copies of rows that travel; here nothing travels
        return None
    ends = [end for end in OPS if row == end or row.endswith((f".{end}", f"_{end}"))]
    assert ends, f"no op known for the row {row}"
    op = OPS[max(ends, key=len)]
    return "layer_norm" if op == "rms_norm" and spec.norm == "layer_norm" else op


def _expected_calls(cost: BlockCost, policy: SavingPolicy, spec: ModelSpec, layer: int) -> Any:
    kind = kind_of(spec, layer)
    again = run_again(cost, _kind(cost, policy, kind), kind)
    rows = (n for n, runs in zip(cost.ops.name, again, strict=True) if runs)
    return Counter(op for row in rows if (op := _op_of(row, spec)) is not None)


def _backward_calls(
    spec: ModelSpec, layer: int, policy: SavingPolicy | None, counter: Callable[[], Any]
) -> Any:
    stage = _stage(spec, [layer], "fp32")
    with _saving(policy):
        edge, gradient = _forward(stage, spec, "fp32", SHAPE)
    with counter() as found:
        torch.autograd.backward((edge,), (gradient,))
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SPECS)
def test_ops_run_again(name: str, policy: str, flop_counter: Any) -> None:
    spec, saving = SPECS[name], POLICIES[policy]
    for layer in range(-1, spec.num_layers + 1):
        cost = layer_cost(spec, layer, ShardShape(micro_batch_size=2, seq_len=16, dtype="fp32"))
        plain = _backward_calls(spec, layer, None, Calls).names
        again = _backward_calls(spec, layer, saving, Calls).names
        again.subtract(plain)
        del again["sort_by_expert"]  # no row of its own: it belongs to the route
        assert +again == _expected_calls(cost, saving, spec, layer), layer
        assert not -again
        kind = kind_of(spec, layer)
        rows = run_again(cost, _kind(cost, saving, kind), kind)
        flops = [_backward_calls(spec, layer, p, flop_counter).flops for p in (None, saving)]
        assert flops[1] - flops[0] == (cost.ops.flops * cost.ops.count)[rows].sum(), layer


def _gradients(spec: ModelSpec, policy: SavingPolicy | None, dtype: str) -> dict[str, Tensor]:
    stage = _stage(spec, range(-1, spec.num_layers + 1), dtype)
    with _saving(policy):
        edge, gradient = _forward(stage, spec, dtype, SHAPE)
    torch.autograd.backward((edge,), (gradient,))
    out = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    for layer, block in stage.moe_blocks().items():
        assert block.loads is not None
        out[f"{layer}.loads"] = block.loads
    return out


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_the_same_to_the_bit(name: str, dtype: str) -> None:
    plain = _gradients(SPECS[name], None, dtype)
    partly = SavingPolicy(recompute="full", layers=1)
    for policy in (*POLICIES.values(), partly):
        found = _gradients(SPECS[name], policy, dtype)
        assert found.keys() == plain.keys()
        for key, value in plain.items():
            assert torch.equal(found[key], value), (policy, key)


@pytest.mark.parametrize("name", SPARSE)
def test_gradients_of_sparse_attention_are_the_same_to_the_bit(name: str) -> None:
    plain = _gradients(SPARSE[name], None, "fp32")
    for policy in POLICIES.values():
        found = _gradients(SPARSE[name], policy, "fp32")
        for key, value in plain.items():
            assert torch.equal(found[key], value), (policy, key)


def test_first_layers_of_a_stage_alone() -> None:
    spec = SPECS["gqa_mlp"]
    costs = [layer_cost(spec, i, ShardShape(micro_batch_size=2, seq_len=16, dtype="fp32"))
             for i in (0, 1)]  # fmt: skip
    state = 2 * 16 * spec.hidden_size * 4
    stage = _stage(spec, [0, 1], "fp32")
    assert stage.rotary is not None
    stage.rotary(16, next(stage.parameters()))
    with Living() as living, _saving(SavingPolicy(recompute="full", layers=1)):
        _edge, gradient = _forward(stage, spec, "fp32", SHAPE)
    found = living.nbytes([*stage.parameters(), *stage.constants(), gradient])
    assert found == state + costs[1].lives.bytes.sum()


@pytest.mark.parametrize("policy", ["full", "kimi", "all"])
@pytest.mark.parametrize("name", ["mla_moe", "gqa_mlp"])
def test_layers_together_are_the_sum_of_each(name: str, policy: str) -> None:
    """None holds, or runs again, what another one made: tables of angles and inputs."""
    spec, saving = SPECS[name], POLICIES[policy]
    layers = range(-1, spec.num_layers + 1)
    costs = {
        i: layer_cost(spec, i, ShardShape(micro_batch_size=2, seq_len=16, dtype="fp32"))
        for i in layers
    }
    calls = []
    for used in (None, saving):
        stage = _stage(spec, layers, "fp32")
        with Living() as living, _saving(used):
            edge, gradient = _forward(stage, spec, "fp32", SHAPE)
        if used is not None:
            for block in stage.moe_blocks().values():
                block.last_choices = block.last_loads = block.loads = None
            found = living.nbytes([*stage.parameters(), *stage.constants(), gradient])
            kinds = {i: kind_of(spec, i) for i in layers}
            assert found == sum(_kept_bytes(costs[i], saving, kinds[i], "fp32") for i in layers)
        with Calls() as counted:
            torch.autograd.backward((edge,), (gradient,))
        calls.append(counted.names)
    calls[1].subtract(calls[0])
    del calls[1]["sort_by_expert"]
    expected = sum((_expected_calls(costs[i], saving, spec, i) for i in layers), Counter())
    assert +calls[1] == expected


def test_a_replayed_choice_is_that_of_its_own_pass() -> None:
    """The backward of a first pass runs after another pass was told other choices."""
    spec = SPECS["mla_moe"]
    gradients = []
    for policy in (None, POLICIES["full"], POLICIES["moe"]):
        stage = _stage(spec, [1], "fp64")
        block = stage.moe_blocks()[1]
        block.routing_replay = torch.arange(3).repeat(32, 1)
        with _saving(policy):
            edge, gradient = _forward(stage, spec, "fp64", SHAPE)
        block.routing_replay = torch.arange(3, 6).repeat(32, 1)
        torch.autograd.backward((edge,), (gradient,))
        gradients.append(stage.model.layers["1"].mlp.experts.down_proj.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_without_a_policy_the_graph_is_the_plain_one() -> None:
    spec = SPECS["mla_moe"]
    seen: list[int] = []
    stage = _stage(spec, [1], "fp32")

    def pack(t: Tensor) -> Tensor:
        seen.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _forward(stage, spec, "fp32", SHAPE)
    outside = list(seen)
    seen.clear()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        _saving(SavingPolicy()),
    ):
        _forward(stage, spec, "fp32", SHAPE)
    assert outside
    assert not seen  # the saver's own hooks took them


@pytest.mark.parametrize("name", ["mla_moe", "gqa_mlp", "gqa_gelu_layer_norm"])
def test_narrow_storage_stays_within_the_formats_error(name: str) -> None:
    """Weight gradients are sums of products with one narrowed factor: e4m3 has 3 bits."""
    plain = _gradients(SPECS[name], None, "fp64")
    for groups in (frozenset(), SELECTIVE_TAGS):
        policy = SavingPolicy(recompute="selective" if groups else "none", groups=groups, fp8=True)
        found = _gradients(SPECS[name], policy, "fp64")
        twice = _gradients(SPECS[name], policy, "fp64")
        differ = 0
        for key, value in plain.items():
            assert torch.equal(found[key], twice[key]), key
            if key.endswith(".loads"):
                assert torch.equal(found[key], value)
                continue
            differ += not torch.equal(found[key], value)
            assert (found[key] - value).norm() <= 2**-4 * value.norm(), key
        assert differ
