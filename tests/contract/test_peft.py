"""Adapters that we write are PEFT's own, and those that PEFT writes are read.

`.ci/targets.sh` makes its environment; FLOPWRIGHT_EXPORT_TARGETS names its folder.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from flopwright.errors import InputError
from flopwright.models.hf.config import model_from_hf_config
from flopwright.models.hf.safetensors_io import load_stage_, save_stage
from flopwright.models.lora.module import adapt_, adapters
from flopwright.models.lora.peft import load_adapters_, save_adapters
from flopwright.models.transformer.module import Stage, build_stage, init_weights_
from flopwright.spec.load import load_model
from flopwright.spec.model import ModelSpec

Need = Callable[[str, bool, str], None]
Ask = Callable[..., Any]

# Loads our model and our adapters, and writes its logits; trains nothing, saves them again.
SCRIPT: Final = """
import json, sys
from pathlib import Path
import torch, transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
folder = Path(sys.argv[1])
tokens = load_file(folder / "tokens.safetensors")["tokens"]
model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
adapted = PeftModel.from_pretrained(model, folder / "ours").eval()
with torch.no_grad():
    ours = adapted(tokens, use_cache=False).logits
adapted.save_pretrained(folder / "again")
config = json.loads((folder / "ours" / "adapter_config.json").read_text())
model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
fresh = get_peft_model(model, LoraConfig(
    r=config["r"], lora_alpha=config["lora_alpha"], target_modules=config["target_modules"],
    target_parameters=config["target_parameters"], task_type="CAUSAL_LM"))
torch.manual_seed(0)
with torch.no_grad():
    for name, p in fresh.named_parameters():
        if "lora_" in name:
            p.copy_(0.2 * torch.randn(p.shape))
    theirs = fresh.eval()(tokens, use_cache=False).logits
fresh.save_pretrained(folder / "theirs")
save_file({"ours": ours, "theirs": theirs}, folder / "logits.safetensors")
trained = sum(p.numel() for n, p in fresh.named_parameters() if p.requires_grad)
print(json.dumps({"trained": trained}))
"""


@pytest.fixture
def ask(need_service: Need, tmp_path: Path) -> Ask:
    """Returns (folder) -> what the script prints in PEFT's environment."""
    targets = os.environ.get("FLOPWRIGHT_EXPORT_TARGETS", "")
    python = Path(targets) / "peft" / "bin" / "python"
    how = ". .ci/targets.sh, which sets FLOPWRIGHT_EXPORT_TARGETS"
    need_service("PEFT", bool(targets) and python.exists(), how)

    def run(folder: Path) -> Any:
        done = subprocess.run(
            [str(python), "-c", SCRIPT, str(folder)],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env={**os.environ, "HOME": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def _small(name: str) -> ModelSpec:
    data = load_model(name).to_data()
    data |= {"hidden_size": 32, "num_layers": 2, "vocab_size": 41, "max_seq_len": 64}
    data["mlp"]["intermediate_size"] = 24
    if name == "qwen3_30b_a3b":
        data["attention"] |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
        data["moe"] |= {"num_experts": 6, "top_k": 2, "expert_intermediate_size": 8}
        data["moe"]["first_dense_layers"] = 1
    else:
        data["attention"] |= {
            "num_heads": 2, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4, "v_head_dim": 5,
        }  # fmt: skip
        data["moe"] |= {
            "num_experts": 8, "top_k": 2, "expert_intermediate_size": 8, "first_dense_layers": 1,
            "num_groups": 1, "top_k_groups": 1,
        }  # fmt: skip
    return ModelSpec.model_validate(data)


def _stage(spec: ModelSpec) -> Stage:
    stage = build_stage(spec, range(-1, spec.num_layers + 1))
    init_weights_(stage, spec, 0)
    with torch.no_grad():
        for i, p in enumerate(stage.parameters()):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
            p.add_(0.4 * noise / (p.shape[-1] ** 0.5 if p.ndim > 1 else 5))
    return stage.eval()


def _adapted(spec: ModelSpec) -> Stage:
    stage = _stage(spec)
    adapt_(stage, 3, alpha=5.0)
    with torch.no_grad():
        for i, (_, adapter) in enumerate(adapters(stage)):
            drawn = torch.randn(adapter.up.shape, generator=torch.Generator().manual_seed(90 + i))
            adapter.up.copy_(0.3 * drawn)
    return stage


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "deepseek_v3"])
def test_peft_adapts_the_model_as_we_do(name: str, ask: Ask, tmp_path: Path) -> None:
    spec, stage = _small(name), _adapted(_small(name))
    tokens = torch.randint(41, (2, 12), generator=torch.Generator().manual_seed(1))
    save_stage(_stage(spec), tmp_path / "model")
    save_adapters(stage, tmp_path / "ours", "model")
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    said = ask(tmp_path)
    logits = load_file(tmp_path / "logits.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(stage(tokens), logits["ours"], rtol=1e-4, atol=1e-5)
    # What they write of ours is what we wrote, to the bit.
    ours, again = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("ours", "again")
    )
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[key], again[key]) for key in ours)
    assert said["trained"] == sum(p.numel() for _, a in adapters(stage) for p in a.parameters())
    found = build_stage(model_from_hf_config(tmp_path / "model"), range(-1, 3)).eval()
    load_stage_(found, tmp_path / "model")
    load_adapters_(found, tmp_path / "theirs")
    with torch.no_grad():
        torch.testing.assert_close(found(tokens), logits["theirs"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "deepseek_v3"])
def test_adapters_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    stage = _adapted(_small(name))
    save_adapters(stage, tmp_path / "a")
    found = _stage(_small(name))
    load_adapters_(found, tmp_path / "a")
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(found(tokens), stage(tokens))
    assert {n for n, p in found.named_parameters() if p.requires_grad} == {
        n for n, p in stage.named_parameters() if p.requires_grad
    }
    with pytest.raises(InputError, match="something here"):
        save_adapters(stage, tmp_path / "a")


def test_everything_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    stage = _adapted(_small("deepseek_v3"))
    save_adapters(stage, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    broken = config | {"use_dora": True, "bias": "all", "r": 0}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(broken))
    with pytest.raises(InputError) as caught:
        load_adapters_(_stage(stage.spec), tmp_path / "a")
    assert {v.field for v in caught.value.violations} == {"use_dora", "bias", "r"}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | {"r": 4}))
    with pytest.raises(InputError) as caught:
        load_adapters_(_stage(stage.spec), tmp_path / "a")
    assert len(caught.value.violations) == 2 * len(list(adapters(stage)))
    kept = load_file(tmp_path / "a" / "adapter_model.safetensors")
    save_file(dict(list(kept.items())[:3]), tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(InputError, match="must adapt"):
        load_adapters_(_stage(stage.spec), tmp_path / "a")
    with pytest.raises(InputError, match="no such file"):
        load_adapters_(_stage(stage.spec), tmp_path / "b")


def test_other_families_are_refused(tmp_path: Path) -> None:
    spec = load_model("kimi_linear_mini")
    stage = build_stage(spec, [0])
    init_weights_(stage, spec, 0)
    adapt_(stage, 2)
    with pytest.raises(InputError, match="laid out otherwise"):
        save_adapters(stage, tmp_path / "a")
