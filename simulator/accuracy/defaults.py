"""What a published row leaves open and its stack decides: silent defaults, each of them named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flopwright.plan.parallel import RecomputeName
from flopwright.simulator.accuracy.rows import Configuration
from flopwright.simulator.accuracy.stack_of_row import StackKey

USUAL_LORA_RANK: Final = 16
# Stacks that recompute every layer unless told otherwise, by framework and era.
_FULL_RECOMPUTE: Final = frozenset({("megatron", "unfused"), ("automodel", "")})
# Stacks whose tensor parallelism keeps whole activations between the cut matrices.
_WHOLE_ACTIVATIONS: Final = frozenset({"internevo", "megatron_deepspeed", "deepspeed"})
# Stacks with no sharding of optimizer state unless a row says so.
_NO_SHARDING: Final = frozenset({("megatron", "unfused"), ("megatron_deepspeed", "unfused")})
_SHARDED_WEIGHTS: Final = frozenset({"fsdp", "torchtitan", "llm_foundry", "automodel", "jax"})
_TAGS: Final = {
    "core_attn": "core_attn", "attention core": "core_attn", "mla_up_proj": "mla_up",
    "moe_act": "moe_act", "mlp": "mlp", "layernorm": "norm", "shared_experts": "shared_experts",
}  # fmt: skip


@dataclass(slots=True)
class Assumed:
    """Assumptions made so far, one sentence each, and flags of a run."""

    made: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)

    def say(self, words: str) -> None:
        """Notes one."""
        if words not in self.made:
            self.made.append(words)

    def replace(self, about: str, words: str) -> None:
        """Notes one in place of those that start with `about`."""
        self.made = [m for m in self.made if not m.startswith(about)]
        self.say(words)


def lora_rank(configuration: Configuration) -> int | None:
    """Returns the rank of a run that trains adapters only; None of one that trains all."""
    name = configuration.text("model").lower()
    parts = [p.strip() for p in configuration.notes.lower().split(";")]
    steps = any(re.search(r"step: q?lora$", p) for p in parts)
    first = re.compile(r"^(q?lora)\b(?!/)")
    said = steps or any(first.match(p) for p in parts)
    if not (said or "lora" in name or re.search(r"-q?lora-", configuration.id.lower())):
        return None
    ranks = re.search(r"\br(?:ank)?[ =]?(\d+)\b", f"{name} {configuration.notes.lower()}")
    return int(ranks[1]) if ranks else USUAL_LORA_RANK


def is_quantized(configuration: Configuration) -> bool:
    """Returns whether frozen weights are stored in 4 bits (QLoRA)."""
    text = f"{configuration.text('model')} {configuration.notes.split('; LoRA/')[0]}".lower()
    return "qlora" in text


def precision_of(
    configuration: Configuration, stack: StackKey, gpu: str, adapters: bool, assumed: Assumed
) -> dict[str, Any]:
    """Returns the fields of `workload.precision`."""
    text = configuration.text("precision").lower()
    hopper = gpu.startswith(("h", "gh"))
    ampere = gpu.startswith("a")
    if not text:
        fp8 = stack.framework == "mlperf" and not ampere
        text = "fp8" if fp8 else "bf16"
        assumed.say(f"precision {text}")
    gemm = _gemm_recipe(text, configuration, hopper)
    compute = "fp16" if "fp16" in text and "bf16" not in text else "bf16"
    if re.fullmatch(r"(fp|tf)32", text):
        compute = "fp32"
    out: dict[str, Any] = {"compute": compute, "weights": compute, "gemm": gemm}
    if stack.framework == "megatron_deepspeed":
        out["gradients"] = compute
    if re.search(r"torchtune", configuration.text("framework").lower()):
        out |= {"gradients": compute, "optimizer_state": compute, "master_weights": "none"}
        assumed.say("gradients and optimizer state in the weights' format")
    if adapters and gemm != "same" and stack.framework == "mlperf":
        out["frozen_weights"] = "fp8"
        assumed.say("frozen weights stored in FP8")
    return out


def _gemm_recipe(text: str, configuration: Configuration, hopper: bool) -> str:
    if "nvfp4" in text or "fp4" in text:
        return "nvfp4"
    if "mx" in text:
        return "mxfp8"
    if "fp8" not in text:
        return "same"
    other = re.search(r"alternate (quantization|granularity)", configuration.notes.lower())
    if "block" in text or (other and hopper):
        return "fp8_block"
    return "mxfp8" if other else "fp8_tensor"


def recompute_of(
    configuration: Configuration, stack: StackKey, assumed: Assumed
) -> tuple[RecomputeName, tuple[str, ...], bool]:
    """Returns (policy, groups it drops, whether only every second layer is recomputed)."""
    text = configuration.text("recompute").lower()
    if not text or not re.match(r"full|none|selective|off|no\b|true|false|yes", text):
        if stack.framework == "torchtitan":
            assumed.say("recompute by operators, torchtitan's own default (not stated)")
            return "selective", (), False
        full = (stack.framework, stack.era) in _FULL_RECOMPUTE or (
            (stack.framework, "") in _FULL_RECOMPUTE and stack.family == "dense"
        )
        policy: RecomputeName = "full" if full else "none"
        assumed.say(f"recompute {policy} (not stated)")
        return policy, (), False
    if text.startswith(("full", "true", "yes")):
        return "full", (), False
    if not text.startswith("selective"):
        return "none", (), False
    tags = tuple(dict.fromkeys(tag for word, tag in _TAGS.items() if word in text))
    if tags or "op-level" in text:
        return "selective", tags, False
    if stack.framework in _SHARDED_WEIGHTS:
        assumed.say("selective recompute: every second layer whole")
        return "full", (), True
    assumed.say("selective recompute: attention itself")
    return "selective", ("core_attn",), False


def sequence_parallel_of(configuration: Configuration, stack: StackKey, assumed: Assumed) -> bool:
    """Returns whether tensor-parallel ranks split tokens between the cut matrices."""
    text = configuration.text("sp").lower()
    if text:
        return text in {"1", "1.0", "true", "yes", "on"}
    if (configuration.whole("tp") or 1) == 1:
        return True
    if re.search(r"; flags: ", configuration.notes):
        assumed.say("sequence parallelism off: not among the flags that are listed")
        return False
    old = stack.era == "unfused" or stack.framework in _WHOLE_ACTIVATIONS
    assumed.say(f"sequence parallelism {'off' if old else 'on'}")
    return not old


def sharding_of(
    configuration: Configuration, stack: StackKey, dp: int, assumed: Assumed
) -> dict[str, Any]:
    """Returns zero_stage, data_parallel, dp_shard and dp_replicate for `dp` ranks."""
    text = configuration.text("zero_or_fsdp").lower()
    fsdp = "hsdp" in text or ("fsdp" in text and "fsdp=0" not in text)
    stage = _zero_stage(text, fsdp)
    if stage is None:
        key = (stack.framework, stack.era)
        fsdp = stack.framework in _SHARDED_WEIGHTS
        stage = 3 if fsdp else 0 if key in _NO_SHARDING else 1
        if dp > 1:
            assumed.say(f"optimizer state sharded as ZeRO-{stage}" if stage else "no sharding")
    if (configuration.whole("pp") or 1) > 1 and stage > 1:
        assumed.say(f"ZeRO-{stage} taken as ZeRO-1 under pipeline parallelism")
        stage = 1
    group = _shard_group(text, configuration, dp)
    return {
        "zero_stage": stage,
        "data_parallel": "fsdp2" if fsdp else "deepspeed",
        "dp_shard": group,
        "dp_replicate": dp // group,
    }


def _zero_stage(text: str, fsdp: bool) -> int | None:
    if fsdp:
        return 2 if "shard_grad" in text else 3
    found = re.search(r"(?:zero)?[ -]?([0-3])\b", text)
    if "zero" in text and found:
        return int(found[1])
    if "dist" in text and "opt" in text:
        return 1
    if text in {"0", "1", "2", "3", "0.0", "1.0", "2.0", "3.0"}:
        return int(float(text))
    return 0 if text in {"none", "ddp", "no"} else None


def _shard_group(text: str, configuration: Configuration, dp: int) -> int:
    """Returns the ranks that share a copy: all, unless the cell names fewer."""
    model_ranks = (configuration.whole("tp") or 1) * (configuration.whole("cp") or 1)
    found = re.search(r"within (\d+)", text)
    size = int(found[1]) // model_ranks if found else 0
    named = re.search(r"(?:fsdp2?|shard) ?= ?(\d+)", text)
    if named and "fsdp=0" not in text:
        size = int(named[1])
    if "hsdp" in text and not named:
        size = 8 // model_ranks
    return size if 0 < size < dp and dp % size == 0 else dp


def offloads_of(configuration: Configuration) -> Mapping[str, bool]:
    """Returns what a run keeps in host memory."""
    text = configuration.text("offload").lower()
    return {
        "activation_offload": "activation" in text,
        "optimizer_offload": "optim" in text,
    }
