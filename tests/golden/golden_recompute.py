"""Recomputes every published number of published_numbers.yaml from the product's functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flopwright.kernels.rope.frequencies import softmax_scale
from flopwright.models.optim.muon.cost import matrices_of, newton_schulz_flops
from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import Phase, ShardShape
from flopwright.plan.learning_rate import learning_rate_at
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.sharding import owned_tensors
from flopwright.planner.whole_run import (
    days_at_rate,
    gpu_years_at_rate,
    sustained_flops_per_s_per_gpu,
)
from flopwright.spec.cache import (
    cache_bytes_per_token,
    recurrent_state_bytes,
    sequence_cache_bytes,
)
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.flops import training_flops
from flopwright.spec.formats import (
    BF16,
    BLOCK_FP8,
    INT4_G32,
    MXFP4,
    NVFP4,
    WeightFormat,
    mixed_bytes,
    release_bytes,
)
from flopwright.spec.load import load_model, load_scenario
from flopwright.spec.model import MlaAttention, ModelSpec, Moe, YarnScaling
from flopwright.spec.parameters import num_active_params, num_params, parameters
from flopwright.spec.workload import LearningRate, Workload
from flopwright.spec.yaml_lines import read_yaml
from flopwright.spec.yarn import correction_dim, correction_range

FILE = Path(__file__).with_name("published_numbers.yaml")
Inputs = Mapping[str, float]

K2 = load_model("kimi_k2")
SCENARIO = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
WORKLOAD = SCENARIO.workload
LAST_LIGHT = (3, *(4,) * 13, 3, 3)
FIRST_HEAVY = (*(4,) * 13, 3, 3, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One published figure, as it stands in the file."""

    id: str
    what: str
    value: float
    unit: str
    source: str
    how: str
    rel_tol: float
    inputs: Mapping[str, float] = field(default_factory=dict)
    model: str = ""
    note: str = ""


def load_numbers() -> tuple[tuple[Number, ...], dict[str, ModelSpec]]:
    """Returns the published figures and the models they count."""
    data = read_yaml(FILE).data
    models = {
        name: ModelSpec.model_validate({"name": name, **shape})
        for name, shape in data["models"].items()
    }
    return tuple(Number(**entry) for entry in data["numbers"]), models


def recompute(number: Number, models: Mapping[str, ModelSpec]) -> float:
    """Returns the product's own value of a published figure."""
    if number.model:
        return num_params(models[number.model])
    return RECOMPUTE[number.id](number.inputs)


def _steps(tokens: int, seq_len: int = 4096) -> Workload:
    return Workload(
        seq_len=seq_len,
        global_batch_size=WORKLOAD.tokens_per_step // seq_len,
        total_tokens=tokens,
    )


def _lr(step: float) -> float:
    return learning_rate_at(round(step), WORKLOAD)


def _hold_steps() -> int:
    assert WORKLOAD.learning_rate.hold_until_tokens is not None
    return WORKLOAD.learning_rate.hold_until_tokens // WORKLOAD.tokens_per_step


def _anneal_end() -> float:
    anneal = _steps(460 * 10**9).model_copy(
        update={
            "learning_rate": LearningRate(kind="cosine", peak=2e-5, final=7e-6, warmup_steps=0)
        }
    )
    return learning_rate_at(anneal.num_steps - 1, anneal)


def stage_bytes(layers: tuple[int, ...]) -> list[int]:
    """Returns bytes of weights and gradients on a GPU of each stage at PP16 x EP16."""
    plan = ParallelPlan(pp=16, ep=16, dp_shard=128, zero_stage=1, layers_per_stage=layers)
    return [
        sum(tensor.numel for tensor in owned_tensors(K2, plan, stage)) * _state_width()
        for stage in range(plan.pp)
    ]


def _state_width() -> int:
    precision = WORKLOAD.precision
    return DTYPE_BYTES[precision.weights] + DTYPE_BYTES[precision.gradients]


def _middle_stages() -> float:
    (value,) = set(stage_bytes(LAST_LIGHT)[1:14])
    return value


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)


def _k3_latent(i: Inputs) -> ModelSpec:
    """A model whose MoE is K3's: its routed experts live in the latent width."""
    moe = Moe(
        num_experts=int(i["num_experts"]),
        top_k=int(i["top_k"]),
        expert_intermediate_size=int(i["expert_intermediate"]),
    )
    update = {"hidden_size": int(i["latent"]), "num_layers": int(i["layers"]), "moe": moe}
    return K2.model_copy(update=update)


def _k3_routed(i: Inputs, active: bool = False) -> int:
    latent = _k3_latent(i)
    assert latent.moe is not None
    total = sum(p.numel for p in parameters(latent) if p.role == "expert")
    return round(total / latent.moe.sparsity) if active else total


def _k3_bytes(i: Inputs, weight_format: WeightFormat) -> float:
    routed = _k3_routed(i)
    return mixed_bytes(routed, weight_format, int(i["total"]) - routed)


def _k3_decode(i: Inputs) -> float:
    routed = _k3_routed(i, active=True)
    return mixed_bytes(routed, MXFP4, int(i["active"]) - routed)


def _k3_cache(i: Inputs) -> int:
    attention = MlaAttention(
        num_heads=96,
        kv_lora_rank=int(i["kv_lora_rank"]),
        qk_nope_head_dim=128,
        qk_rope_head_dim=int(i["qk_rope_head_dim"]),
        v_head_dim=128,
    )
    return cache_bytes_per_token(attention, int(i["mla_layers"]))


def _kda(i: Inputs) -> int:
    dim = int(i["dim"])
    return recurrent_state_bytes(int(i["layers"]), int(i["heads"]), dim, dim, int(i["width"]))


def _yarn() -> tuple[YarnScaling, int, float]:
    assert isinstance(K2.attention, MlaAttention)
    rope = K2.attention.rope
    assert rope.scaling is not None
    return rope.scaling, K2.attention.qk_rope_head_dim, rope.theta


def _yarn_softmax(i: Inputs) -> float:
    scaling, _, _ = _yarn()
    return softmax_scale(1, scaling.model_copy(update={"factor": i["factor"]}))


def _muon_share(i: Inputs) -> float:
    """Newton-Schulz of every expert matrix over the model FLOPs of a step."""
    groups = [matrices_of(p) for p in parameters(K2) if p.role == "expert"]
    flops = sum(float(g.count) * newton_schulz_flops(g.rows, g.columns) for g in groups)
    return flops / training_flops(i["active"], WORKLOAD.tokens_per_step)


def _dispatch_bytes_per_token(model: ModelSpec) -> float:
    """All-to-all payload of a token in one MoE layer, the part that stays on its rank included."""
    ep, tokens = 16, 4096
    shape = ShardShape(micro_batch_size=1, seq_len=tokens, ep=ep, dtype="bf16")
    comms = layer_cost(model, model.num_layers - 1, shape).comms
    (leaving,) = (
        float(comms.bytes[row, 0])
        for row, name in enumerate(comms.name)
        if "dispatch" in name and comms.phase[row] == Phase.FORWARD
    )
    return leaving / tokens * ep / (ep - 1)


def _yarn_dimension() -> float:
    scaling, width, theta = _yarn()
    return correction_dim(1.0, width, theta, scaling.original_max_seq_len)


def _flops(i: Inputs) -> float:
    return training_flops(i["active"], i["tokens"])


RECOMPUTE: dict[str, Callable[[Inputs], float]] = {
    "k2_params": lambda _: num_params(K2),
    "k2_active_without_embedding": lambda _: num_active_params(K2),
    "k2_active_with_embedding": lambda _: num_active_params(K2, input_embedding=True),
    "k2_active_published": lambda _: num_active_params(K2, input_embedding=True),
    "k2_expert_params": lambda _: sum(p.numel for p in parameters(K2) if p.role == "expert"),
    "k2_sparsity": lambda _: K2.moe.sparsity if K2.moe else 0.0,
    "k3_sparsity": lambda i: (
        Moe(
            num_experts=int(i["num_experts"]), top_k=int(i["top_k"]), expert_intermediate_size=1
        ).sparsity
    ),
    "k2_training_flops": _flops,
    "k2_dense_flops": _flops,
    "k2_dense_ratio": lambda i: (
        training_flops(i["total"], i["tokens"]) / training_flops(i["active"], i["tokens"])
    ),
    "k2_gpu_years": lambda i: gpu_years_at_rate(_flops(i), i["rate"]),
    "k2_days": lambda i: days_at_rate(_flops(i), i["rate"], int(i["gpus"])),
    "deepseek_v3_rate": lambda i: sustained_flops_per_s_per_gpu(_flops(i), i["gpu_hours"]),
    "k2_muon_share": _muon_share,
    "k2_tokens_per_step": lambda _: WORKLOAD.tokens_per_step,
    "k2_steps": lambda _: WORKLOAD.num_steps,
    "k2_warmup_tokens": lambda _: WORKLOAD.learning_rate.warmup_steps * WORKLOAD.tokens_per_step,
    "k2_anneal_steps_4k": lambda _: _steps(400 * 10**9).num_full_steps,
    "k2_anneal_steps_32k": lambda _: _steps(60 * 10**9, 32768).num_full_steps,
    "k2_lr_first_step": lambda _: _lr(0),
    "k2_lr_after_warmup": lambda _: _lr(WORKLOAD.learning_rate.warmup_steps - 1),
    "k2_lr_at_10t": lambda _: _lr(_hold_steps() - 1),
    "k2_lr_mid_decay": lambda _: _lr((_hold_steps() + WORKLOAD.num_steps) / 2),
    "k2_lr_at_15_5t": lambda _: _lr(WORKLOAD.num_steps - 1),
    "k2_lr_end_of_anneal": lambda _: _anneal_end(),
    "k2_state_bytes": lambda _: num_params(K2) * _state_width(),
    "k2_stage_mean_bytes": lambda _: _mean(stage_bytes(LAST_LIGHT)),
    "k2_stage_first_bytes": lambda _: stage_bytes(LAST_LIGHT)[0],
    "k2_stage_middle_bytes": lambda _: _middle_stages(),
    "k2_stage_light_bytes": lambda _: stage_bytes(LAST_LIGHT)[14],
    "k2_stage_last_bytes": lambda _: stage_bytes(LAST_LIGHT)[15],
    "k2_stage_first_heavy_bytes": lambda _: stage_bytes(FIRST_HEAVY)[0],
    "k2_fp8_bytes": lambda _: release_bytes(K2, BLOCK_FP8),
    "k2_gpus_for_weights": lambda _: -(-release_bytes(K2, BLOCK_FP8) // (80 * 10**9)),
    "k2_thinking_bytes": lambda _: release_bytes(K2, INT4_G32),
    "k3_routed_params": _k3_routed,
    "k3_mxfp4_bytes": lambda i: _k3_bytes(i, MXFP4),
    "k3_bf16_bytes": lambda i: _k3_bytes(i, BF16),
    "k3_nvfp4_bytes": lambda i: _k3_bytes(i, NVFP4),
    "k3_batch1_decode_bytes": _k3_decode,
    "k2_cache_per_token": lambda _: cache_bytes_per_token(K2.attention, K2.num_layers),
    "k2_cache_128k": lambda _: sequence_cache_bytes(K2, 128 * 1024),
    "k3_cache_per_token": _k3_cache,
    "k3_cache_1m": lambda i: _k3_cache(i) * 2**20,
    "k3_kda_state_fp32": _kda,
    "k3_kda_state_bf16": _kda,
    "k3_kda_layer_state": _kda,
    "k3_kda_layer_state_in_tokens": lambda i: _kda(i) / _k3_cache(i),
    "k2_ep_bytes": lambda _: _dispatch_bytes_per_token(K2),
    "k3_ep_bytes": lambda i: _dispatch_bytes_per_token(_k3_latent(i)),
    "yarn_scale_32": lambda _: softmax_scale(1, _yarn()[0]),
    "yarn_scale_40": _yarn_softmax,
    "yarn_scale_64": _yarn_softmax,
    "yarn_dimension": lambda _: _yarn_dimension(),
    "yarn_low": lambda _: correction_range(*_yarn())[0],
    "yarn_high": lambda _: correction_range(*_yarn())[1],
}
