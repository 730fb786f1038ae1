"""A Megatron-LM command line becomes a scenario and a plan.

Flags: Megatron-LM's `megatron/training/arguments.py`. What the flags say of the model is
held against the model that was given; flags without a counterpart are listed, not dropped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.plan.parallel import SELECTIVE_TAGS, even_split
from flopwright.planner.import_.imported import ImportedRun, assemble, data_parallel_size
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.model import ModelSpec

Flags = Mapping[str, tuple[str, ...]]

_TAGS: Final = {
    "layernorm": "norm",
    "mla_up_proj": "mla_up",
    "moe_act": "swiglu",
    "core_attn": "core_attn",
    "mlp": "mlp",
    "moe": "moe",
    "shared_experts": "shared_experts",
}
_RECIPES: Final = {
    "delayed": "fp8_tensor",
    "tensorwise": "fp8_tensor",
    "blockwise": "fp8_block",
    "mxfp8": "mxfp8",
}
_RINGS: Final = {"p2p": "ring", "a2a": "ulysses", "allgather": "all_gather", "a2a+p2p": "ring"}
# Flags that are read here, or that only restate the model.
_READ: Final = frozenset(
    """tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size cp-comm-type
    expert-model-parallel-size expert-tensor-parallel-size num-layers-per-virtual-pipeline-stage
    num-virtual-stages-per-pipeline-rank pipeline-model-parallel-layout sequence-parallel
    micro-batch-size global-batch-size seq-length train-samples train-iters bf16 fp16 fp8-format
    fp8-recipe fp4-format use-distributed-optimizer use-megatron-fsdp
    data-parallel-sharding-strategy recompute-granularity recompute-modules recompute-method
    recompute-num-layers recompute-activations optimizer-cpu-offload optimizer-offload-fraction
    lr min-lr lr-decay-style lr-warmup-samples lr-warmup-iters weight-decay adam-beta1 adam-beta2
    adam-eps clip-grad optimizer accumulate-allreduce-grads-in-fp32 num-layers hidden-size
    num-attention-heads num-experts moe-router-topk seed""".split()  # noqa: SIM905
)


def parse_flags(text: str) -> Flags:
    """Returns every --flag of a command line, script or argument array with its values."""
    plain = re.sub(r"\\\n", " ", text)
    plain = "\n".join(line for line in plain.splitlines() if not line.lstrip().startswith("#"))
    out: dict[str, tuple[str, ...]] = {}
    name = ""
    try:
        words = shlex.split(re.sub(r"^\s*\w+=\(|^\s*\)\s*$", " ", plain, flags=re.M))
    except ValueError as error:
        raise InputError(f"the command line cannot be read: {error}") from error
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("_", "-")
            out[name] = (value,) if value else ()
        elif name:
            out[name] = (*out[name], word)
    if not out:
        raise InputError("no --flags were found in the command line")
    return out


class _Reader:
    """Typed values of flags; what cannot be read is collected."""

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self.broken: list[Violation] = []

    def number(self, name: str, default: float | None = None) -> float | None:
        """Returns the flag's number; `default` where it does not stand."""
        if name not in self.flags:
            return default
        try:
            return float(self.flags[name][0])
        except (IndexError, ValueError):
            value = " ".join(self.flags[name])
            self.broken.append(Violation(field=f"--{name}", value=value, rule="must be a number"))
            return default

    def count(self, name: str, default: int = 1) -> int:
        """Returns the flag's whole number."""
        return int(self.number(name, default) or default)

    def word(self, name: str, default: str = "") -> str:
        """Returns the flag's first value."""
        return (self.flags.get(name) or (default,))[0]


def import_megatron(
    text: str, model: ModelSpec, cluster: ClusterSpec, *, gpus: int, name: str = "megatron"
) -> ImportedRun:
    """Returns the job of a Megatron-LM command line.

    Args:
        gpus: ranks of the job; Megatron's data-parallel size is what is left of them.

    Raises:
        InputError: flags that contradict the model, cannot be read, or break a rule.
    """
    read = _Reader(parse_flags(text))
    _same_model(read, model)
    tp, pp, cp = (
        read.count(f"{axis}-parallel-size")
        for axis in ("tensor-model", "pipeline-model", "context")
    )
    dp = data_parallel_size(gpus, tp=tp, pp=pp, cp=cp)
    parallel: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp_shard": dp,
        "ep": read.count("expert-model-parallel-size"),
        "micro_batch_size": read.count("micro-batch-size"),
        "sequence_parallel": "sequence-parallel" in read.flags or tp == 1,
        "zero_stage": _zero_stage(read),
        "optimizer_offload": "optimizer-cpu-offload" in read.flags,
        **_pipeline(read, model, pp),
        **_recompute(read),
    }
    if cp > 1:
        parallel["context_parallel"] = _RINGS.get(read.word("cp-comm-type", "p2p"), "ring")
    if model.moe is not None:
        # Megatron cuts experts by tp unless it is told otherwise.
        parallel["etp"] = read.count("expert-tensor-parallel-size", tp)
    assumed = []
    if "global-batch-size" not in read.flags:
        assumed.append("global_batch_size: one micro-batch a data-parallel rank, Megatron's own")
    workload = _workload(read, parallel["micro_batch_size"] * dp)
    if read.broken:
        raise InputError(read.broken)
    not_read = [f"--{flag}" for flag in read.flags if flag not in _READ and flag not in _MODEL]
    return assemble(name, model, cluster, workload, parallel, assumed=assumed, not_read=not_read)


# Flags that describe the model, which is read from its own file.
_MODEL: Final = frozenset(
    """ffn-hidden-size max-position-embeddings vocab-size normalization norm-epsilon swiglu
    disable-bias-linear untie-embeddings-and-output-weights attention-dropout hidden-dropout
    kv-channels group-query-attention num-query-groups qk-layernorm add-qkv-bias window-size
    position-embedding-type rotary-base rotary-percent multi-latent-attention q-lora-rank
    kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim rope-type rotary-scaling-factor
    original-max-position-embeddings beta-fast beta-slow mscale mscale-all-dim
    use-rope-scaling rope-scaling-factor moe-ffn-hidden-size moe-layer-freq
    moe-shared-expert-intermediate-size moe-router-score-function
    moe-router-enable-expert-bias moe-router-bias-update-rate moe-router-num-groups
    moe-router-group-topk moe-router-topk-scaling-factor moe-router-load-balancing-type
    moe-aux-loss-coeff moe-router-pre-softmax""".split()  # noqa: SIM905
)


def _same_model(read: _Reader, model: ModelSpec) -> None:
    facts = {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "num-attention-heads": model.attention.num_heads,
    }
    if model.moe is not None:
        facts |= {"num-experts": model.moe.num_experts, "moe-router-topk": model.moe.top_k}
    for flag, fact in facts.items():
        said = read.number(flag)
        if said is not None and said != fact:
            read.broken.append(
                Violation(
                    field=f"--{flag}",
                    value=f"{said:g}",
                    rule=f"{model.name} has {fact}",
                    nearest_fix="give the model that the job trains",
                )
            )


def _zero_stage(read: _Reader) -> int:
    if "use-megatron-fsdp" in read.flags:
        strategy = read.word("data-parallel-sharding-strategy", "no_shard")
        return {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}.get(strategy, 0)
    return 1 if "use-distributed-optimizer" in read.flags else 0


def _pipeline(read: _Reader, model: ModelSpec, pp: int) -> dict[str, Any]:
    layers, vpp, split = model.num_layers, 1, None
    if "pipeline-model-parallel-layout" in read.flags:
        chunks = _unfold(read.word("pipeline-model-parallel-layout")).split("|")
        split = tuple(chunk.count("t") for chunk in chunks)
        vpp = max(len(chunks) // pp, 1)
        if sum(split) != layers:
            read.broken.append(
                Violation(
                    field="--pipeline-model-parallel-layout",
                    value=str(sum(split)),
                    rule=f"{model.name} has {layers} layers",
                    nearest_fix="count the t's",
                )
            )
        if split == even_split(layers, len(split)):
            split = None
    elif "num-layers-per-virtual-pipeline-stage" in read.flags:
        vpp = max(layers // (pp * read.count("num-layers-per-virtual-pipeline-stage")), 1)
    elif "num-virtual-stages-per-pipeline-rank" in read.flags:
        vpp = read.count("num-virtual-stages-per-pipeline-rank")
    return {
        "vpp": vpp,
        "schedule": "interleaved_1f1b" if vpp > 1 else "1f1b",
        "layers_per_stage": split,
    }


def _unfold(layout: str) -> str:
    """Returns Megatron's layout with its repetitions written out: (tt|)*3 and t*4."""
    text = layout.replace(",", "").replace(" ", "")
    group = re.compile(r"\(([^()]*)\)\*(\d{1,4})|([A-Za-z])\*(\d{1,4})")
    while match := group.search(text):
        what, times = match[1] if match[1] is not None else match[3], match[2] or match[4]
        text = text[: match.start()] + what * int(times) + text[match.end() :]
    return text


def _recompute(read: _Reader) -> dict[str, Any]:
    kind = read.word("recompute-granularity")
    if "recompute-activations" in read.flags:
        kind = "selective"
    if kind == "full":
        out: dict[str, Any] = {"recompute": "full"}
        if read.word("recompute-method") == "block":
            out["recompute_layers"] = read.count("recompute-num-layers")
        return out
    if kind == "selective":
        modules = read.flags.get("recompute-modules") or ("core_attn",)
        unknown = [m for m in modules if m not in _TAGS]
        read.broken += [
            Violation(
                field="--recompute-modules",
                value=module,
                rule="not a module that can be computed again",
                nearest_fix=f"known: {', '.join(sorted(_TAGS))}",
            )
            for module in unknown
        ]
        tags = sorted(_TAGS[m] for m in modules if m in _TAGS)
        # The plan's own default list stays unnamed.
        named = () if set(tags) == SELECTIVE_TAGS else tuple(tags)
        return {"recompute": "selective", "recompute_tags": named}
    return {}


def _workload(read: _Reader, one_batch: int) -> dict[str, Any]:
    batch = read.count("global-batch-size", one_batch)
    seq = read.count("seq-length", 0)
    if not seq:
        read.broken.append(Violation(field="--seq-length", rule="is needed"))
        seq = 1
    compute = "bf16" if "bf16" in read.flags else "fp16" if "fp16" in read.flags else "fp32"
    wide = compute == "fp32"
    precision: dict[str, Any] = {
        "compute": compute,
        "weights": compute,
        "gradients": "fp32"
        if wide or compute == "bf16" or "accumulate-allreduce-grads-in-fp32" in read.flags
        else compute,
        "master_weights": "none" if wide else "fp32",
    }
    if "fp8-format" in read.flags:
        precision["gemm"] = _RECIPES.get(read.word("fp8-recipe", "delayed"), "fp8_tensor")
    if "fp4-format" in read.flags:
        precision["gemm"] = "nvfp4"
    out: dict[str, Any] = {
        "seq_len": seq,
        "global_batch_size": batch,
        "precision": precision,
        "optimizer": {"kind": "muon" if "muon" in read.word("optimizer") else "adamw"},
    }
    samples = read.number("train-samples")
    if samples is None and "train-iters" in read.flags:
        samples = (read.number("train-iters") or 0) * batch
    if samples:
        out["total_tokens"] = int(samples) * seq
    peak = read.number("lr")
    if peak:
        # the shape of the schedule does not move a step's time; its ends are kept
        out["learning_rate"] = {
            "kind": "constant" if read.word("lr-decay-style") == "constant" else "cosine",
            "peak": peak,
            "final": read.number("min-lr", 0.0) or 0.0,
            "warmup_steps": 0,
        }
    return out
