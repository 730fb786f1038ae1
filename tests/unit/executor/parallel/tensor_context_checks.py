"""One rank of the checks in test_tensor_context_ranks.py: `... WORLD RANK FOLDER`.

Every check trains two micro-batches of a small model under a plan and compares loss and
gradients with the whole model in this process, whose attention, matrices and loss are the
one-rank ones. What was sent is compared with the rows of the cost tables. fp64 but where a
check's name says otherwise.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.activations import ActivationStore
from flopwright.executor.parallel.data_parallel.choose import clip_gradients, make_data_parallel
from flopwright.executor.parallel.data_parallel.interface import Trainable
from flopwright.executor.parallel.groups import GroupRegistry, Groups
from flopwright.executor.parallel.pipeline import MicroBatch, Runner, StageParts
from flopwright.executor.parallel.sharing import (
    Sharing,
    make_sharing,
    tp_partial_names,
    tp_whole_names,
)
from flopwright.executor.parallel.whole_tensors import joined_tensor
from flopwright.models.slices import own_part
from flopwright.models.transformer.cost import layer_cost
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.ops import Collective, Phase, ShardShape
from flopwright.plan.hops import states_into_chunks, sums_held
from flopwright.plan.lower import lower
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import SELECTIVE_TAGS, ParallelPlan
from flopwright.plan.schedules.actions import ActionKind
from flopwright.plan.schedules.placement import chunks_of_stage
from flopwright.plan.sharding import tensor_cuts
from flopwright.simulator.training.layers import kind_of
from flopwright.simulator.training.recompute import Policy, exchanged_again
from flopwright.spec.model import (
    GqaAttention,
    KdaAttention,
    MlaAttention,
    Mlp,
    ModelSpec,
    Moe,
)
from flopwright.spec.parameters import parameters
from flopwright.spec.workload import Optimizer, Precision

CPU = torch.device("cpu")
SEQ, SEED, MICROBATCHES = 16, 3, 2
NARROW = {"bf16": torch.bfloat16, "fp32": torch.float32}
MLA = MlaAttention(
    num_heads=8, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=5,
)  # fmt: skip
MOE = Moe(
    num_experts=8, top_k=3, expert_intermediate_size=12, num_shared_experts=1,
    first_dense_layers=1, sequence_balance_loss=0.01,
)  # fmt: skip


def spec_of(**changes: Any) -> ModelSpec:
    """Returns a model of four layers; 45 tokens that neither 2 nor 4 ranks share evenly."""
    data: dict[str, Any] = {
        "name": "small",
        "hidden_size": 24,
        "num_layers": 2,
        "vocab_size": 45,
        "max_seq_len": SEQ,
        "mlp": Mlp(intermediate_size=32),
    }
    return ModelSpec(**(data | changes))


SPECS = {
    "k2": spec_of(attention=MLA, moe=MOE),
    "llama": spec_of(attention=GqaAttention(num_heads=8, num_kv_heads=4, head_dim=6)),
    "mla": spec_of(attention=MLA.model_copy(update={"q_lora_rank": None})),
    "gpt": spec_of(
        attention=GqaAttention(
            num_heads=4, num_kv_heads=4, head_dim=6, rope=None, bias=True, o_bias=True
        ),
        mlp=Mlp(kind="gelu", intermediate_size=32, bias=True),
        norm="layer_norm",
        positions="learned",
        tied_embeddings=True,
    ),
    "qwen": spec_of(
        attention=GqaAttention(num_heads=4, num_kv_heads=4, head_dim=6, qk_norm=True), moe=MOE
    ),
    "k3": spec_of(
        num_layers=4,
        attention=MLA.model_copy(update={"rope": None, "output_gate": True}),
        linear_attention=KdaAttention(num_heads=8, head_dim=4, decay_lower_bound=-5),
        full_attention_layers=(2,),
        attn_res_block=2,
        mlp=Mlp(kind="situ_glu", intermediate_size=32, gate_bound=4, up_bound=25),
        moe=MOE.model_copy(
            update={"latent_size": 12, "balance": "quantile", "sequence_balance_loss": 0.0}
        ),
    ),
}
PLANS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "k2 tp2": {"tp": 2},
        "k2 tp2 mbs2": {"tp": 2, "micro_batch_size": 2},
        "k2 tp2 ep2": {"tp": 2, "ep": 2},
        "k2 tp2 etp2": {"tp": 2, "etp": 2},
        "k2 dp2 etp2": {"dp_shard": 2, "etp": 2},
        "k2 cp2 ring": {"cp": 2, "micro_batch_size": 2},
        "k2 cp2 all_gather": {"cp": 2, "context_parallel": "all_gather"},
        "k2 cp2 ulysses": {"cp": 2, "context_parallel": "ulysses"},
        "k2 cp2 ep2": {"cp": 2, "ep": 2},
        "llama tp2": {"tp": 2, "micro_batch_size": 2},
        "llama tp2 whole": {"tp": 2, "sequence_parallel": False},
        "llama tp2 fused": {"tp": 2, "micro_batch_size": 2, "fused_loss": True},
        "mla tp2 whole fused": {"tp": 2, "sequence_parallel": False, "fused_loss": True},
        "llama cp2 ring": {"cp": 2},
        "llama cp2 all_gather": {"cp": 2, "context_parallel": "all_gather"},
        "llama cp2 ulysses": {"cp": 2, "context_parallel": "ulysses", "micro_batch_size": 2},
        "mla tp2": {"tp": 2},
        "mla tp2 whole": {"tp": 2, "sequence_parallel": False},
        "gpt tp2": {"tp": 2},
        "gpt tp2 whole": {"tp": 2, "sequence_parallel": False},
        "gpt cp2 ring": {"cp": 2},
        "qwen tp2": {"tp": 2, "recompute": "full"},
        "k2 tp2 bf16": {"tp": 2},
        "llama cp2 ring bf16": {"cp": 2},
        "llama cp2 all_gather fp32": {"cp": 2, "context_parallel": "all_gather"},
        "k2 tp2 selective": {"tp": 2, "recompute": "selective"},
        "mla tp2 selective": {"tp": 2, "recompute": "selective"},
        "k2 cp2 core": {"cp": 2, "recompute": "selective", "recompute_tags": ("core_attn",)},
        "k2 cp2 full": {"cp": 2, "recompute": "full", "micro_batch_size": 2},
        "qwen cp2 ulysses": {"cp": 2, "context_parallel": "ulysses"},
        "k3 cp2 ring": {"cp": 2, "micro_batch_size": 2},
        "k3 cp2 all_gather fp32": {"cp": 2, "context_parallel": "all_gather"},
        "k3 cp2 full": {"cp": 2, "recompute": "full"},
        "k3 cp2 ulysses core": {
            "cp": 2,
            "context_parallel": "ulysses",
            "recompute": "selective",
            "recompute_tags": ("core_attn",),
        },
    },
    4: {
        "k2 tp4": {"tp": 4},
        "k2 tp4 ep2 etp2": {"tp": 4, "ep": 2, "etp": 2},
        "k2 tp2 cp2 ring": {"tp": 2, "cp": 2, "ep": 4},
        "k2 tp2 cp2 ulysses": {"tp": 2, "cp": 2, "context_parallel": "ulysses", "ep": 2},
        "k2 cp4 ring": {"cp": 4, "micro_batch_size": 2},
        "k2 cp4 all_gather": {"cp": 4, "context_parallel": "all_gather"},
        "k2 tp2 pp2": {"tp": 2, "pp": 2},
        "k2 cp2 pp2": {"cp": 2, "pp": 2, "schedule": "gpipe"},
        "k2 tp2 dp2 ep2": {"tp": 2, "dp_shard": 2, "ep": 2},
        "k2 tp2 pp2 zero bubble": {"tp": 2, "pp": 2, "schedule": "zb_h1"},
        "llama tp4": {"tp": 4},
        "llama tp2 cp2 ring": {"tp": 2, "cp": 2},
        "llama tp2 cp2 ulysses": {"tp": 2, "cp": 2, "context_parallel": "ulysses"},
        "llama tp2 pp2 whole": {"tp": 2, "pp": 2, "sequence_parallel": False},
        "k2 tp2 cp2 fused": {"tp": 2, "cp": 2, "ep": 2, "fused_loss": True},
        "llama tp2 dp2": {"tp": 2, "dp_shard": 2},
        "llama cp4 ring": {"cp": 4},
        "k3 cp4 ring": {"cp": 4},
        "k3 tp2 cp2 ulysses": {"tp": 2, "cp": 2, "context_parallel": "ulysses"},
        "k3 cp2 pp2": {"cp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
    },
}


def check(name: str, plan: ParallelPlan, registry: GroupRegistry) -> dict[str, Any]:
    """Returns how far loss, gradients and their norm are from the whole model's."""
    spec = SPECS[name.split()[0]]
    groups = registry.build(Mesh(plan))
    timer = ActionTimer(dist.get_rank(), CPU)
    dtype = next((t for n, t in NARROW.items() if n in name.split()), torch.float64)
    sharing = make_sharing(plan, groups, timer)
    chunks = {
        c: sharing.build_chunk(spec, c, dtype, CPU)
        for c in chunks_of_stage(plan, groups.coordinates["pp"])
    }
    for stage in chunks.values():
        init_weights_(stage, spec, SEED)
        stage.train()
    whole = build_stage(spec, range(-1, spec.num_layers + 1), dtype=dtype)
    init_weights_(whole, spec, SEED)
    whole.train()
    reference = dict(whole.named_parameters())
    same_weights = all(same_bits(chunks, reference, sharing, spec))
    shake_vectors_(chunks, reference, sharing, spec)
    for stage, parts in ((whole, MICROBATCHES * plan.dp), *((s, 2) for s in chunks.values())):
        for block in stage.moe_blocks().values():
            block.gate.balance_share = 1 / parts
    tokens = torch.randint(
        0, spec.vocab_size, (MICROBATCHES, plan.dp, plan.micro_batch_size, SEQ + 1),
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    expected_loss, loads = train_whole(whole, tokens)
    trainable = trainable_of(chunks, groups, timer)
    data_parallel = make_data_parallel(plan, trainable)
    runner = runner_of(plan, spec, chunks, sharing, groups, timer, data_parallel, dtype)
    mine = tokens[:, groups.coordinates["dp"]]
    timer.start_step()
    found = runner.run_step([batch_of(sharing, t) for t in mine])
    norm = clip_gradients(data_parallel, None, groups.world, trainable)
    events = timer.finish_step().events
    total = torch.zeros(1, dtype=torch.float64)
    if found is not None:
        total += found.double() / (plan.dp * plan.cp * plan.tp)
    groups.world.sum_(total)
    expected_norm = torch.stack([g.norm() for g in gradients(reference)]).norm()
    return {
        "loss": abs(float(total) / float(expected_loss) - 1),
        "gradient": worst_gradient(chunks, reference, sharing, spec),
        "weights": same_weights,
        "joined": all([*joined_again(chunks, reference, sharing, groups, spec)]),
        "norm": abs(float(norm) / float(expected_norm) - 1),
        "loads": loads_equal(chunks, loads, groups, plan),
        "sent": [f"{k}: {n}" for k, n in sent(events).items()],
        "priced": [f"{k}: {n}" for k, n in priced(spec, plan, groups, dtype).items()],
        # Last, because its forward pass counts loads too.
        "kept": kept_bytes(chunks, batch_of(sharing, mine[0]), fused=plan.fused_loss)
        if plan.pp == 1
        else 0,
        "kept_priced": priced_bytes(spec, shape_of(plan, dtype)) if plan.pp == 1 else 0,
    }


def train_whole(whole: Stage, tokens: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Leaves the gradients of the mean over all micro-batches; returns that loss, and loads."""
    total = torch.zeros((), dtype=torch.float64)
    flat = tokens.flatten(0, 1)
    for batch in flat:
        value = loss(whole(batch[:, :-1].contiguous()), batch[:, 1:].contiguous())
        (value / len(flat)).backward()
        total += value.detach() / len(flat)
    loads = {n: b.loads for n, b in whole.moe_blocks().items() if b.loads is not None}
    return total, loads


def trainable_of(chunks: dict[int, Stage], groups: Groups, timer: ActionTimer) -> Trainable:
    """Returns what is trained, without masters."""
    named = [item for stage in chunks.values() for item in stage.named_parameters()]
    return Trainable(
        parameters=dict(named),
        expert_names=frozenset(n for n, _ in named if ".mlp.experts." in n),
        groups=groups,
        optimizer=Optimizer(),
        precision=Precision(
            compute="fp64", weights="fp64", gradients="fp64", optimizer_state="fp64",
            master_weights="none",
        ),
        timer=timer,
        chunks=chunks,
        tp_whole_names=tp_whole_names(chunks.values()),
        tp_partial_names=tp_partial_names(chunks.values()),
    )  # fmt: skip


def runner_of(
    plan: ParallelPlan, spec: ModelSpec, chunks: dict[int, Stage], sharing: Sharing,
    groups: Groups, timer: ActionTimer, data_parallel: Any, dtype: torch.dtype,
) -> Runner:  # fmt: skip
    """Returns the runner of this rank's list."""
    reduce = data_parallel.reduce_gradients
    store = ActivationStore(plan, chunks, timer, CPU)
    return Runner(
        actions=lower(plan, MICROBATCHES)[groups.coordinates["pp"]],
        parts=StageParts(
            chunks=chunks,
            num_chunks=plan.num_chunks,
            loss_fn=lambda logits, targets: sharing.tensor.loss(logits, targets, spec.vocab_size),
            hidden_shape=sharing.hidden_shape(SEQ, spec.hidden_size),
            dtype=dtype,
            device=CPU,
            around=store,
            fused_loss=plan.fused_loss,
            hidden_states=states_into_chunks(spec, plan),
            sums_held=sums_held(spec, plan),
            hooks={
                ActionKind.REDUCE_GRADIENTS: lambda a: reduce(a.chunk, a.microbatch, a.bucket),
                ActionKind.OPTIMIZER_STEP: lambda _: data_parallel.finish_gradients(),
                **store.hooks(),
            },
        ),
        groups=groups,
        timer=timer,
    )


def batch_of(sharing: Sharing, rows: Tensor) -> MicroBatch:
    """Returns this rank's part of sequences [B, S + 1]."""
    return MicroBatch(
        tokens=sharing.own_tokens(rows[:, :-1]).contiguous(),
        targets=sharing.own_tokens(rows[:, 1:]).contiguous(),
    )


def gradients(parameters_by_name: dict[str, Any]) -> list[Tensor]:
    """Returns the gradients, zeros where no token came."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters_by_name.values()]


def own_slices(chunks: dict[int, Stage], sharing: Sharing, spec: ModelSpec) -> Any:
    """Yields (name, own parameter, function that takes its part of a whole tensor)."""
    cuts = {p.name: tensor_cuts(p) for p in parameters(spec)}
    for stage in chunks.values():
        for name, parameter in stage.named_parameters():
            yield name, parameter, lambda t, n=name: own_part(t, cuts[n], sharing.places)


def worst_gradient(
    chunks: dict[int, Stage], reference: dict[str, Any], sharing: Sharing, spec: ModelSpec
) -> float:
    """Returns the largest relative norm of a tensor's gradient error."""
    # The gradient of a key bias is zero but for rounding: it has no relative error.
    worst, floor = 0.0, 1e-8 * float(torch.stack([g.norm() for g in gradients(reference)]).norm())
    for name, parameter, take in own_slices(chunks, sharing, spec):
        whole = reference[name].grad
        whole = torch.zeros_like(reference[name]) if whole is None else whole
        error = (parameter.grad - take(whole)).norm() / whole.norm().clamp(min=floor)
        worst = max(worst, float(error))
    return worst


def same_bits(
    chunks: dict[int, Stage], reference: dict[str, Any], sharing: Sharing, spec: ModelSpec
) -> Any:
    """Yields whether each first weight is its slice of the whole one."""
    for name, parameter, take in own_slices(chunks, sharing, spec):
        yield torch.equal(parameter.detach(), take(reference[name].detach()))


def loads_equal(
    chunks: dict[int, Stage], expected: dict[int, Tensor], groups: Groups, plan: ParallelPlan
) -> bool:
    """Returns whether the experts' tokens, summed over a stage's ranks, are the whole model's."""
    equal = True
    for stage in chunks.values():
        for number, block in stage.moe_blocks().items():
            assert block.loads is not None
            summed = groups.tp.sum_(groups.dp_cp.sum_(block.loads.clone()))
            equal = equal and torch.equal(summed, expected[number])
    return equal


def joined_again(
    chunks: dict[int, Stage], reference: dict[str, Any], sharing: Sharing, groups: Groups,
    spec: ModelSpec,
) -> Any:  # fmt: skip
    """Yields whether each tensor, put together, is the whole one; experts are left cut."""
    params = {p.name: p for p in parameters(spec)}
    for name, parameter, _ in own_slices(chunks, sharing, spec):
        whole = reference[name].detach()
        size, index = sharing.places["ep"]
        if params[name].role == "expert":
            whole = whole.chunk(size)[index]
        yield torch.equal(joined_tensor(parameter.detach(), params[name], groups), whole)


def kept_bytes(chunks: dict[int, Stage], batch: MicroBatch, *, fused: bool) -> int:
    """Returns the bytes of storages saved for the backward pass of a micro-batch, each once."""
    (stage,) = chunks.values()
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        if fused:
            value = stage(batch.tokens, targets=batch.targets)
        else:
            value = stage.loss(stage(batch.tokens), batch.targets)
    for tensor in (*stage.parameters(), *stage.buffers(), *stage.constants()):
        seen.pop(tensor.untyped_storage()._cdata, None)
    del value
    return sum(seen.values())


def priced_bytes(spec: ModelSpec, shape: ShardShape) -> int:
    """Returns the same from the rows of the cost tables."""
    layers = range(-1, spec.num_layers + 1)
    return sum(int(layer_cost(spec, n, shape).lives.bytes.sum()) for n in layers)


def shape_of(plan: ParallelPlan, dtype: torch.dtype) -> ShardShape:
    """Returns what the cost tables need to know of a plan."""
    return ShardShape(
        micro_batch_size=plan.micro_batch_size, seq_len=SEQ, tp=plan.tp, ep=plan.ep, cp=plan.cp,
        dtype={t: n for n, t in NARROW.items()}.get(dtype, "fp64"), etp=plan.etp,
        sequence_parallel=plan.sequence_parallel, ulysses=plan.context_parallel == "ulysses",
        fused_loss=plan.fused_loss,
    )  # fmt: skip


def shake_vectors_(
    chunks: dict[int, Stage], reference: dict[str, Any], sharing: Sharing, spec: ModelSpec
) -> None:
    """Moves norms and biases off their first values, alike here and in the whole model."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in reference.values():
            if tensor.ndim == 1:
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
        for name, parameter, take in own_slices(chunks, sharing, spec):
            parameter.copy_(take(reference[name]))


def sent(events: Any) -> Counter[str]:
    """Returns how often each collective over tp, cp and etp ran, with its bytes."""
    out: Counter[str] = Counter()
    classes = {"tp_comm": "tp", "cp_comm": "cp", "ep_comm": "etp"}
    for e in events:
        kind, colon, _ = e.name.partition(":")
        if e.cls in classes and colon:
            out[f"{kind} {classes[e.cls]} {e.nbytes}"] += 1
    return out


def priced(
    spec: ModelSpec, plan: ParallelPlan, groups: Groups, dtype: torch.dtype
) -> Counter[str]:
    """Returns the same from the rows of the cost tables; a ring is a gather in several hops."""
    shape = shape_of(plan, dtype)
    index = groups.coordinates["pp"]
    layers = [*plan.stage_layers(spec.num_layers)[index]]
    layers += [-1] * (index == 0) + [spec.num_layers] * (index == plan.pp - 1)
    out: Counter[str] = Counter()
    for layer in layers:
        cost = layer_cost(spec, layer, shape)
        table, kind_of_layer = cost.comms, kind_of(spec, layer)
        policy = Policy(plan.recompute, frozenset(plan.recompute_tags) or SELECTIVE_TAGS)
        again = exchanged_again(cost, policy.of(kind_of_layer), kind_of_layer)
        for row in range(len(table)):
            count = int(table.count[row, 0]) * MICROBATCHES * (2 if again[row] else 1)
            kind = Collective(table.collective[row]).name.lower()
            group, nbytes = table.group[row], int(table.bytes[row, 0])
            if count == 0 or group == "ep":
                continue
            if table.name[row].endswith("kv_context") and plan.context_parallel == "ring":
                kind, count, nbytes = "ring", count * (plan.cp - 1), nbytes // plan.cp
            out[f"{kind} {group} {nbytes}"] += count
    assert Phase.STEP not in {Phase(p) for p in table.phase}
    return out


def main() -> None:
    """Runs every check of the world's size."""
    world, rank, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    only = sys.argv[4] if len(sys.argv) > 4 else ""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        world_size=world,
        rank=rank,
        timeout=timedelta(seconds=120),
    )
    registry = GroupRegistry()
    found = {
        name: check(name, ParallelPlan(**plan), registry)
        for name, plan in PLANS[world].items()
        if only in name
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
