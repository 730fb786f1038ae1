"""Logits, gradients and generation equal transformers' for every family, same weights.

Bound of a tensor: max |a - b| / max |b| <= 1e-5 (gradients 1e-4), or twice the error that
transformers' own fp32 run has against its float64 run, where that is more.

Kimi Linear runs in a process of its own, from which `fla` is hidden: where it is installed,
transformers takes its functions, which need a GPU.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwright.kernels.rope.frequencies import inverse_frequencies, softmax_scale, table_scale
from flopwright.models.hf.config import model_from_hf_config
from flopwright.models.hf.safetensors_io import load_stage_
from flopwright.models.transformer.module import Stage, build_stage, loss
from flopwright.spec.load import load_model
from flopwright.spec.model import LinearScaling, Llama3Scaling, ModelSpec, Rope, YarnScaling

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

BATCH, SEQ, VOCAB = 2, 24, 97
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GQA = COMMON | {"num_key_value_heads": 2}
MLA = COMMON | {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "num_mtp_layers": 0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 5e4, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

GLM = GQA | {
    "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "num_mtp_layers": 0,
}  # fmt: skip
KIMI = COMMON | {
    "num_hidden_layers": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "num_experts": 8, "num_experts_per_token": 3,
    "num_shared_experts": 1, "moe_intermediate_size": 20, "linear_num_heads": 3,
    "linear_head_dim": 8, "linear_conv_kernel_dim": 4, "routed_scaling_factor": 1.5,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}  # fmt: skip

INDEXED = MLA | {"index_topk": 7, "index_n_heads": 16, "index_head_dim": 16}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3", MLA),
    "deepseek_v3_groups": ("DeepseekV3", MLA | {"n_group": 4, "topk_group": 2}),
    "deepseek_v3_no_q_lora": ("DeepseekV3", MLA | {"q_lora_rank": None}),
    "deepseek_v3_yarn": ("DeepseekV3", MLA | {"rope_parameters": YARN}),
    "deepseek_v32": ("DeepseekV32", INDEXED),
    "deepseek_v32_yarn": ("DeepseekV32", INDEXED | {"rope_parameters": YARN}),
    "deepseek_v32_short": ("DeepseekV32", INDEXED | {"index_topk": 64}),
    "glm4_moe": ("Glm4Moe", GLM | {"use_qk_norm": True}),
    "glm4_moe_plain": ("Glm4Moe", GLM | {"attention_bias": True}),
    "minimax_m2": (
        "MiniMaxM2",
        GQA | {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    ),
    "kimi_linear": ("KimiLinear", KIMI),
    "kimi_linear_q_lora": ("KimiLinear", KIMI | {"q_lora_rank": 24}),
    "llama": ("Llama", GQA),
    "llama_biases": ("Llama", GQA | {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3_rope": ("Llama", GQA | {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", GQA | {"tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", GQA | WINDOW),
    "qwen3": ("Qwen3", GQA | {"head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", GQA | EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe_not_normalised": ("Qwen3Moe", GQA | EXPERTS | {"head_dim": 12}),
    "mixtral": ("Mixtral", GQA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_window": (
        "Mixtral",
        GQA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64,
            "bos_token_id": None, "eos_token_id": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
}  # fmt: skip


def _theirs(name: str) -> Any:
    """Returns transformers' model with weights that no symmetry can hide behind."""
    kind, options = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, head)(config).eval()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 1:
                p.copy_((0.0 if key.endswith("bias") else 1.0) + 0.1 * noise)
            else:
                p.copy_(noise / p.shape[-1] ** 0.5)
        for key, b in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                b.copy_(0.1 * torch.randn(b.shape, generator=generator))
    return model


def _in_our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns GPT-2's and Kimi Linear's tensors under our names, [out, in]; q, k and v apart."""
    parts = {
        "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "mlp.c_fc": "mlp.up_proj",
        "attn.c_proj": "self_attn.o_proj", "mlp.c_proj": "mlp.down_proj",
    }  # fmt: skip
    tables = {"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".self_attn.conv1d." in name:
            for proj, piece in zip("qkv", tensor.chunk(3), strict=True):
                out[name.replace("conv1d", f"{proj}_conv1d")] = piece
            continue
        if not name.startswith("transformer."):
            flat = tensor.flatten() if name.endswith(".A_log") else tensor
            out[name.replace("forget_gate.", "")] = flat
            continue
        path, leaf = name.removeprefix("transformer.").rsplit(".", 1)
        if path in tables:
            out[f"model.{tables[path]}.{leaf}"] = tensor
            continue
        _, number, part = path.split(".", 2)
        turned = tensor.t() if tensor.ndim == 2 else tensor
        if part == "attn.c_attn":
            for proj, piece in zip("qkv", turned.chunk(3), strict=True):
                out[f"model.layers.{number}.self_attn.{proj}_proj.{leaf}"] = piece
        else:
            out[f"model.layers.{number}.{parts[part]}.{leaf}"] = turned
    return out


def _ours(model: Any, folder: Path) -> Stage:
    """Returns our model, read from the config and the safetensors file that theirs writes."""
    model.save_pretrained(folder)
    spec = model_from_hf_config(folder)
    stage = build_stage(spec, range(-1, spec.num_layers + 1))
    load_stage_(stage, folder)
    return stage.eval()


def _tokens() -> Tensor:
    return torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))


def _gradients(
    module: nn.Module, logits: Tensor, value: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    value(logits, _tokens().roll(-1, 1)).backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def _their_run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(_tokens(), use_cache=False).logits
    grads = _gradients(model, logits, lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten()))
    return logits.detach(), _in_our_names(grads)


def _error(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


HERE = [name for name, (kind, _) in CASES.items() if kind != "KimiLinear"]
APART = [name for name in CASES if name not in HERE]


@pytest.mark.parametrize("name", HERE)
def test_logits_and_gradients(name: str, tmp_path: Path) -> None:
    check_logits_and_gradients(name, tmp_path)


@pytest.mark.parametrize("name", HERE)
def test_greedy_generation_with_caches(name: str, tmp_path: Path) -> None:
    check_generation(name, tmp_path)


@pytest.mark.parametrize("name", APART)
def test_kimi_linear_whether_or_not_fla_is_installed(name: str, tmp_path: Path) -> None:
    """A package of this name is in the way of both checks; they must not touch it."""
    (tmp_path / "path" / "fla").mkdir(parents=True)
    (tmp_path / "path" / "fla" / "__init__.py").write_text(NO_DRIVER)
    program = f"""
import sys
sys.modules["fla"] = None
from pathlib import Path
import {Path(__file__).stem} as checks
checks.check_logits_and_gradients({name!r}, Path("logits"))
checks.check_generation({name!r}, Path("generation"))
assert sys.modules["fla"] is None
print("both hold")
"""
    before = [p for p in (os.environ.get("PYTHONPATH"),) if p]
    path = os.pathsep.join([str(tmp_path / "path"), str(Path(__file__).parent), *before])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("both hold\n")


# What transformers looks for in it: functions that do not run without a GPU.
NO_DRIVER = """
import sys, types
__version__ = "0.6.0"
def chunk_kda(*args, **kwargs):
    raise RuntimeError("0 active drivers")
fused_recurrent_kda = chunk_kda
ops = types.ModuleType("fla.ops")
ops.kda = types.ModuleType("fla.ops.kda")
ops.kda.chunk_kda = ops.kda.fused_recurrent_kda = chunk_kda
sys.modules |= {"fla.ops": ops, "fla.ops.kda": ops.kda}
"""


def check_logits_and_gradients(name: str, folder: Path) -> None:
    """Holds our logits and gradients against those of transformers' model with these weights."""
    model = _theirs(name)
    wide = copy.deepcopy(model).double()
    if hasattr(wide, "set_experts_implementation"):
        wide.set_experts_implementation("eager")  # the grouped product has no float64
    stage = _ours(model, folder)
    logits, grads = _their_run(model)
    exact_logits, exact_grads = _their_run(wide)
    found = stage(_tokens())
    own = _gradients(stage, found, loss)
    assert _error(found, logits) <= max(1e-5, 2 * _error(logits, exact_logits))
    assert own.keys() == grads.keys()
    for key, grad in own.items():
        bound = max(1e-4, 2 * _error(grads[key], exact_grads[key]))
        assert _error(grad, grads[key]) <= bound, key


def check_generation(name: str, folder: Path) -> None:
    """Holds what we generate from caches against what transformers' model does."""
    model, prompt, new = _theirs(name), _tokens()[:, :9], 20
    stage = _ours(model, folder)
    theirs = model.generate(prompt, max_new_tokens=new, do_sample=False, use_cache=True)
    cache, ids = stage.make_cache(BATCH, prompt.shape[1] + new), prompt
    with torch.no_grad():
        for _ in range(new):
            logits = stage(ids[:, cache.positions :], cache)
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(ids, theirs)


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (Rope(theta=5e4, scaling=YarnScaling(
            factor=32, original_max_seq_len=4096, beta_fast=1, beta_slow=1, mscale=1,
            mscale_all_dim=1)),  # Kimi K2
         {"rope_type": "yarn", "rope_theta": 5e4, "factor": 32.0, "beta_fast": 1.0,
          "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
          "original_max_position_embeddings": 4096}),
        (Rope(scaling=YarnScaling(
            factor=40, original_max_seq_len=4096, mscale=1, mscale_all_dim=1)),  # DeepSeek-V3
         {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "beta_fast": 32.0,
          "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
          "original_max_position_embeddings": 4096}),
        (Rope(theta=1e6, scaling=YarnScaling(factor=4, original_max_seq_len=32768)),  # Qwen2.5
         {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
          "original_max_position_embeddings": 32768}),
        (Rope(theta=5e5, scaling=Llama3Scaling(
            factor=8, original_max_seq_len=8192, low_freq_factor=1, high_freq_factor=4)),
         {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
        (Rope(scaling=LinearScaling(factor=2)),
         {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        (Rope(), {"rope_type": "default", "rope_theta": 1e4}),
    ],
    ids=["kimi_k2", "deepseek_v3", "qwen", "llama3", "linear", "plain"],
)  # fmt: skip
def test_rotary_frequencies(rope: Rope, parameters: dict[str, Any]) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    options = MLA | {
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "rope_parameters": parameters,
        "max_position_embeddings": 131072,
    }  # fmt: skip
    config = transformers.DeepseekV3Config(**options)
    theirs = deepseek.DeepseekV3RotaryEmbedding(config)
    np.testing.assert_allclose(inverse_frequencies(rope, 64), theirs.inv_freq, rtol=5e-7)
    assert table_scale(rope.scaling) == pytest.approx(theirs.attention_scaling, rel=1e-12)
    attention = deepseek.DeepseekV3Attention(config, 0)
    assert softmax_scale(192, rope.scaling) == pytest.approx(attention.scaling, rel=1e-12)


def _gpt_oss() -> tuple[Any, Stage]:
    """Returns transformers' gpt-oss and ours with its weights, which it lays out otherwise."""
    options = GQA | {
        "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 7,
        "intermediate_size": 20, "rms_norm_eps": 1e-5, "attn_implementation": "eager",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 16,
        },
    }  # fmt: skip
    torch.manual_seed(5)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**options)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) / (p.shape[-2] ** 0.5 if p.ndim > 2 else 4))
    spec = _gpt_oss_spec()
    stage = build_stage(spec, range(-1, spec.num_layers + 1)).eval()
    stage.load_state_dict(_as_gpt_oss(model.state_dict()))
    return model, stage


def _gpt_oss_spec() -> ModelSpec:
    data = load_model("gpt_oss_20b").to_data()
    data |= {"hidden_size": 48, "num_layers": 3, "vocab_size": VOCAB, "max_seq_len": 64}
    data["attention"] |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "sliding_window": 7}
    data["attention"]["rope"]["scaling"] |= {"factor": 8.0, "original_max_seq_len": 16}
    data["mlp"]["intermediate_size"] = 20
    data["moe"] |= {"num_experts": 8, "top_k": 3, "expert_intermediate_size": 20}
    return ModelSpec.model_validate(data)


def _as_gpt_oss(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns theirs under our names: experts [out, in], gate rows above up rows."""
    out = {}
    for name, tensor in tensors.items():
        if ".experts." in name and not name.endswith("_bias"):
            tensor = tensor.transpose(1, 2)
        if "gate_up_proj" in name:
            tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), 1)
        out[name.replace(".router.", ".gate.")] = tensor
    return out


def test_gpt_oss_logits_gradients_and_generation() -> None:
    model, stage = _gpt_oss()
    logits, grads = _their_run(model)
    found = stage(_tokens())
    assert _error(found, logits) <= 1e-5
    for key, grad in _gradients(stage, found, loss).items():
        assert _error(grad, _as_gpt_oss(grads)[key]) <= 1e-4, key
    prompt = _tokens()[:, :9]
    theirs = model.generate(prompt, max_new_tokens=20, do_sample=False, use_cache=True)
    cache, ids = stage.make_cache(BATCH, 29), prompt
    with torch.no_grad():
        for _ in range(20):
            ids = torch.cat((ids, stage(ids[:, cache.positions :], cache)[:, -1:].argmax(-1)), 1)
    assert torch.equal(ids, theirs)
