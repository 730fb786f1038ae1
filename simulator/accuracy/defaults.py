"""What a published row leaves open and its stack decides: silent defaults, each of them named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.plan.parallel import RecomputeName
from flopwright.simulator.accuracy.rows import Configuration
from flopwright.simulator.accuracy.stack_of_row import StackKey

USUAL_LORA_RANK: Final = 16
_USUAL_NODE: Final = 8
# Stacks that recompute every layer unless told otherwise, by framework and era.
_FULL_RECOMPUTE: Final = frozenset({("megatron", "unfused"), ("automodel", "")})
# Frameworks whose shipped configurations recompute every layer: GPT-NeoX (checkpoint-activations),
# LLaMA-Factory (disable_gradient_checkpointing false), verl (enable_gradient_checkpointing),
# Unsloth (use_gradient_checkpointing).
_CHECKPOINTED: Final = re.compile(r"neox|llama.?factory|\bverl\b|unsloth")
# Stacks whose tensor parallelism keeps whole activations between the cut matrices.
_WHOLE_ACTIVATIONS: Final = frozenset({"internevo", "megatron_deepspeed", "deepspeed"})
# Stacks with no sharding of optimizer state unless a row says so.
_NO_SHARDING: Final = frozenset({("megatron", "unfused"), ("megatron_deepspeed", "unfused")})
_SHARDED_WEIGHTS: Final = frozenset({"fsdp", "torchtitan", "llm_foundry", "automodel", "jax"})
_TAGS: Final = {
    "core_attn": "core_attn", "attention core": "core_attn", "mla_up_proj": "mla_up",
    "moe_act": "moe_act", "mlp": "mlp", "layernorm": "norm", "shared_experts": "shared_experts",
}  # fmt: skip


_HALF: Final = re.compile(
    r"\b(1|one)( layer)? (in|of|out of) (2|two)\b|(every|each) (2nd|second|other) layer|\b1/2\b"
    r"|\b50 ?%"
)


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


def lora_targets(stack: StackKey) -> str:
    """Returns which matrices a framework's recipes adapt (their documentation).

    NeMo and Megatron Bridge adapt the fused query, key and value product where speed counts,
    MLPerf's reference the attention; the others all linear layers.
    """
    if stack.framework in {"nemo", "megatron_bridge"}:
        return "qkv"
    return "attention" if stack.framework == "mlperf" else "all"


def is_quantized(configuration: Configuration) -> bool:
    """Returns whether frozen weights are stored in 4 bits (QLoRA)."""
    text = f"{configuration.text('model')} {configuration.notes.split('; LoRA/')[0]}".lower()
    return "qlora" in text


def precision_of(
    configuration: Configuration, stack: StackKey, gpu: str, adapters: bool, assumed: Assumed
) -> dict[str, Any]:
    """Returns the fields of `workload.precision`.

    Raises:
        InputError: a format that the library does not price.
    """
    text = _plain_format(configuration.text("precision"))
    hopper = gpu.startswith(("h", "gh"))
    ampere = gpu.startswith("a")
    if not text:
        fp8 = stack.framework == "mlperf" and not ampere
        text = "fp8" if fp8 else "bf16"
        assumed.say(f"precision {text}")
    gemm = _gemm_recipe(text, configuration, hopper)
    compute = "fp16" if "fp16" in text and "bf16" not in text else "bf16"
    if re.fullmatch(r"(fp|tf)32.*", text) and not re.search(r"bf16|fp16|fp8", text):
        if text.startswith("tf"):
            rule = "matrix products in TF32 have no cost here"
            raise InputError(Violation(field="precision", value=repr(text), rule=rule))
        compute = "fp32"
    elif not re.search(r"(fp|tf|bf|mxfp|nvfp)\d", text):
        assumed.say(f"bf16: the precision is given as {text!r}")
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


def _plain_format(cell: str) -> str:
    """Returns a precision in the short names of formats."""
    text = re.sub(r"b(rain)?[_ ]?float[_ -]?16|bfloat\b", "bf16", cell.lower())
    text = re.sub(r"float[_ -]?(8|16|32)", r"fp\1", text)
    text = re.sub(r"\bhalf\b", "fp16", text)
    text = re.sub(r"\b(e4m3|e5m2|hybrid fp8|ms-?amp)\b", r"fp8 \1", text)
    return re.sub(r"(?<=[fp])[ _-](?=\d)", "", text)


def _gemm_recipe(text: str, configuration: Configuration, hopper: bool) -> str:
    if "nvfp4" in text or "fp4" in text:
        return "nvfp4"
    if re.search(r"mx(?!net)", text):
        return "mxfp8"
    if "fp8" not in text:
        return "same"
    other = re.search(r"alternate (quantization|granularity)", configuration.notes.lower())
    if re.search(r"block|sub-?channel|1x128|128x128|tile", text) or (other and hopper):
        return "fp8_block"
    return "mxfp8" if other else "fp8_tensor"


def recompute_of(
    configuration: Configuration, stack: StackKey, assumed: Assumed
) -> tuple[RecomputeName, tuple[str, ...], bool]:
    """Returns (policy, groups it drops, whether only every second layer is recomputed)."""
    text = configuration.text("recompute").lower()
    policy = _policy_of(text)
    if policy is None:
        if text:
            assumed.say(f"recompute is given as {text!r}, taken as not stated")
        return _usual_recompute(configuration, stack, assumed), (), False
    if policy != "selective":
        return policy, (), False
    if _HALF.search(text):
        return "full", (), True
    words = re.sub(r"[\s\-_]+", "_", text)
    tags = tuple(dict.fromkeys(t for w, t in _TAGS.items() if w.replace(" ", "_") in words))
    if tags or re.search(r"op_level|sac\b", words):
        return "selective", tags, False
    if stack.framework in _SHARDED_WEIGHTS:
        assumed.say("selective recompute: every second layer whole")
        return "full", (), True
    assumed.say("selective recompute: attention itself")
    return "selective", ("core_attn",), False


def _policy_of(text: str) -> RecomputeName | None:
    """Returns the policy that a cell states, None where it states none that is known.

    Every second layer counts as selective, since a part is kept.
    """
    if re.match(r"(none|off|no|false|n|0|0\.0|disabled?|without)\b", text):
        return "none"
    if _HALF.search(text) or re.match(r"(selective|sac\b|op-level)", text):
        return "selective"
    kept = re.sub(r"[\s\-_]+", "_", text)
    if text and "full" not in text and any(w.replace(" ", "_") in kept for w in _TAGS):
        return "selective"
    if re.match(r"(full|true|yes|y|on|1|1\.0|enabled?|all|uniform|each|every)\b", text):
        return "full"
    return "full" if re.search(r"checkpoint|recompute|\bac\b|\bfull\b", text) else None


def _usual_recompute(
    configuration: Configuration, stack: StackKey, assumed: Assumed
) -> RecomputeName:
    """Returns the policy of a stack whose row does not state one."""
    if stack.framework == "torchtitan":
        assumed.say("recompute by operators, torchtitan's own default (not stated)")
        return "selective"
    if _CHECKPOINTED.search(configuration.text("framework").lower()):
        assumed.say("recompute full, the framework's own default (not stated)")
        return "full"
    full = (stack.framework, stack.era) in _FULL_RECOMPUTE or (
        (stack.framework, "") in _FULL_RECOMPUTE and stack.family == "dense"
    )
    policy: RecomputeName = "full" if full else "none"
    assumed.say(f"recompute {policy} (not stated)")
    return policy


def sequence_parallel_of(configuration: Configuration, stack: StackKey, assumed: Assumed) -> bool:
    """Returns whether tensor-parallel ranks split tokens between the cut matrices."""
    text = configuration.text("sp").lower()
    if text:
        return not re.match(r"(0|0\.0|false|no|off|none|n|disabled?)\b", text)
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
    if not text and re.search(r"\bddp\b", configuration.text("framework").lower()):
        text = "ddp"
    fsdp = bool(re.search(r"hsdp|full_?shard|shard_grad_op", text)) or (
        "fsdp" in text and not re.search(r"fsdp=0|no_shard", text)
    )
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


def shards_weights(configuration: Configuration, stack: StackKey) -> bool:
    """Returns whether weights are sharded over all ranks, so that an unstated tp or pp is 1.

    Where a row says nothing of it, it is so in stacks that are built around sharded weights.
    """
    text = configuration.text("zero_or_fsdp").lower()
    stated = r"fsdp(?!=0)|hsdp|full_?shard|(zero|stage)[\s_-]*(stage)?[\s_-]*[23]"
    silent = not any(configuration.text(c) for c in ("zero_or_fsdp", "tp", "pp"))
    return bool(re.search(stated, text)) or (silent and stack.framework in _SHARDED_WEIGHTS)


def _zero_stage(text: str, fsdp: bool) -> int | None:
    if "no_shard" in text:
        return 0
    if fsdp or re.search(r"full_?shard", text):
        return 2 if re.search(r"shard_grad|optim_grads\b", text) else 3
    found = re.search(r"(?:zero|stage)[\s_-]*(?:stage)?[\s_-]*([0-3])(?!\d)", text)
    if found:
        return int(found[1])
    if "zero++" in text:
        return 3
    if re.search(r"dist.*opt|opt.*shard|shard.*opt", text):
        return 1
    if text in {"0", "1", "2", "3", "0.0", "1.0", "2.0", "3.0"}:
        return int(float(text))
    return 0 if re.fullmatch(r"none|(torch )?ddp|no|off|false|dp", text) else None


def _shard_group(text: str, configuration: Configuration, dp: int) -> int:
    """Returns the ranks that share a copy: all, unless the cell names fewer."""
    model_ranks = (configuration.whole("tp") or 1) * (configuration.whole("cp") or 1)
    found = re.search(r"within (\d+)", text)
    size = int(found[1]) // model_ranks if found else 0
    named = re.search(r"(?:fsdp2?|shard) ?= ?(\d+)", text)
    if named and "fsdp=0" not in text:
        size = int(named[1])
    if "hsdp" in text and not named:
        pair = re.search(r"(\d+) ?[x*] ?(\d+)", text)
        both = (int(pair[1]), int(pair[2])) if pair else (0, 0)
        # A pair is (replicas, shards), but for one that starts with the GPUs of a node.
        size = (both[0] if both[0] == _USUAL_NODE else both[1]) or _USUAL_NODE // model_ranks
    return size if 0 < size < dp and dp % size == 0 else dp


def offloads_of(configuration: Configuration) -> Mapping[str, bool]:
    """Returns what a run keeps in host memory."""
    sharding = configuration.text("zero_or_fsdp").lower()
    text = configuration.text("offload").lower()
    whole = bool(re.match(r"(true|yes|on|1|cpu|zero)\b", text)) or "offload" in sharding
    return {
        "activation_offload": "activation" in text,
        "optimizer_offload": "optim" in text or whole,
    }
