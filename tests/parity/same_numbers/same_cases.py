"""The shrunk models, their workload and their data, alike for every plan and the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from same_plans import MICRO_BATCH, STEPS

from flopwright.executor.data.batches import Dataset
from flopwright.spec.load import load_scenario
from flopwright.spec.model import (
    GqaAttention,
    KdaAttention,
    MlaAttention,
    Mlp,
    ModelSpec,
    Moe,
)
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import LearningRate, Optimizer, Precision, Workload

SEQ: Final = 16
BATCH: Final = 16
TAU: Final = 0.25  # below the first weights' logits: heads are clipped from the first step on
COMMON: Final[dict[str, Any]] = {"hidden_size": 32, "num_layers": 4, "vocab_size": 64}
LATENT: Final = MlaAttention(
    num_heads=4,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
)
MODELS: Final = {
    "k2": ModelSpec(
        name="k2",
        attention=LATENT,
        mlp=Mlp(intermediate_size=48),
        moe=Moe(
            num_experts=8,
            top_k=2,
            num_shared_experts=1,
            expert_intermediate_size=16,
            first_dense_layers=1,
            router="sigmoid_noaux_tc",
            routed_scaling_factor=2.5,
            sequence_balance_loss=1e-3,
            bias_update_rate=1e-3,
        ),
        **COMMON,
    ),
    "k3": ModelSpec(
        name="k3",
        norm_eps=1e-5,  # as K3 has it, and Kimi Linear: see docs/models.md
        attention=LATENT.model_copy(update={"rope": None, "output_gate": True}),
        linear_attention=KdaAttention(num_heads=4, head_dim=8, decay_lower_bound=-5),
        full_attention_layers=(2,),
        attn_res_block=2,
        mlp=Mlp(kind="situ_glu", intermediate_size=48, gate_bound=4, up_bound=25),
        moe=Moe(
            num_experts=8,
            top_k=2,
            num_shared_experts=1,
            expert_intermediate_size=16,
            latent_size=16,
            first_dense_layers=1,
            balance="quantile",
        ),
        **COMMON,
    ),
    "kl": ModelSpec(
        name="kl",
        norm_eps=1e-5,
        attention=LATENT.model_copy(update={"rope": None, "q_lora_rank": None}),
        linear_attention=KdaAttention(num_heads=4, head_dim=8, output_gate_rank=6),
        full_attention_layers=(3,),
        mlp=Mlp(intermediate_size=48),
        moe=Moe(
            num_experts=8,
            top_k=2,
            num_shared_experts=1,
            expert_intermediate_size=16,
            first_dense_layers=1,
            router="sigmoid_noaux_tc",
            routed_scaling_factor=2.446,
            bias_update_rate=1e-3,
        ),
        **COMMON,
    ),
    "llama": ModelSpec(
        name="llama",
        attention=GqaAttention(num_heads=4, num_kv_heads=2, head_dim=8),
        mlp=Mlp(intermediate_size=64),
        **COMMON,
    ),
}


def workload(optimizer: str, dtype: str) -> Workload:
    """Returns what is trained, with an optimizer and format.

    eps is large for an AdamW: an update is then about proportional to its gradient, so that
    a wrong scale shows, and rounding errors of vanishing gradients are not blown up.
    """
    fields = {"compute": dtype, "weights": dtype, "gradients": dtype, "optimizer_state": dtype}
    muon = optimizer == "muonclip"
    return load_scenario("kimi_k2_mini_2cpu_fp32").workload.model_copy(
        update={
            "seq_len": SEQ,
            "global_batch_size": BATCH,
            "total_tokens": SEQ * BATCH * STEPS,
            "precision": Precision(master_weights="none", **fields),
            "optimizer": Optimizer(
                kind="muon" if muon else "adamw",
                eps=1e-3,
                gradient_clip=0.5,
                qk_clip_tau=TAU if muon else None,
            ),
            "learning_rate": LearningRate(kind="cosine", peak=1e-2, final=1e-3, warmup_steps=3),
            "seed": 11,
        }
    )


def scenario(model: str, optimizer: str, dtype: str, ranks: int) -> Scenario:
    """Returns the scenario of a launch."""
    base = load_scenario("kimi_k2_mini_2cpu_fp32")
    node = base.cluster.node.model_copy(update={"gpus": ranks})
    return base.model_copy(
        update={
            "cluster": base.cluster.model_copy(update={"node": node}),
            "model": MODELS[model],
            "workload": workload(optimizer, dtype),
        }
    )


def dataset(spec: Workload) -> Dataset:
    """Returns tokens with something to learn: each mostly follows from the one before."""
    rng = np.random.default_rng(5)
    vocab = COMMON["vocab_size"]
    follows = rng.permutation(vocab)
    tokens = [0]
    for _ in range(6000):
        tokens.append(int(follows[tokens[-1]]) if rng.random() < 0.7 else int(rng.integers(vocab)))
    stream = np.array(tokens, dtype=np.uint16)
    meta: Any = None
    return Dataset(
        folder=Path(),
        meta=meta,
        train=stream,
        held_out=stream[:500],
        seq_len=spec.seq_len,
        global_batch_size=spec.global_batch_size,
        seed=spec.seed,
    )


def micro_batches(data: Dataset, step: int) -> Any:
    """Returns all micro-batches of a step in order, [count, MICRO_BATCH, seq_len + 1]."""
    return data.batch(step).reshape(-1, MICRO_BATCH, data.seq_len + 1)
