"""Hands an exported file to its target's own parser; run by the target's own interpreter.

check_target.py TARGET FILE...: the last line is a JSON object of each file and what the parser
says against it, "" where it takes it. Nothing of flopwright is imported.
"""

import ast
import json
import re
import shlex
import sys
from pathlib import Path


def kubeflow(path: Path) -> None:
    import yaml
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    data = yaml.safe_load(path.read_text())
    if (data.get("apiVersion"), data.get("kind")) != ("trainer.kubeflow.org/v1alpha1", "TrainJob"):
        raise ValueError("not a trainer.kubeflow.org/v1alpha1 TrainJob")
    job = TrainerV1alpha1TrainJob.from_dict(data)
    # The client drops what it does not know; the cluster's schema would refuse it.
    lost = _lost(data, job.to_dict(), "")
    if lost:
        raise ValueError(f"unknown fields: {', '.join(lost)}")
    name = data["metadata"]["name"]
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name):
        raise ValueError(f"metadata.name {name!r} is no RFC 1123 label")


def _lost(asked: object, kept: object, where: str) -> list[str]:
    if isinstance(asked, dict) and isinstance(kept, dict):
        gone = [f"{where}.{k}" for k in asked if k not in kept]
        both = [k for k in asked if k in kept]
        return gone + [p for k in both for p in _lost(asked[k], kept[k], f"{where}.{k}")]
    if isinstance(asked, list) and isinstance(kept, list):
        return [p for a, b in zip(asked, kept, strict=True) for p in _lost(a, b, f"{where}[]")]
    return []


def skypilot(path: Path) -> None:
    import sky

    sky.Task.from_yaml(str(path))


def dstack(path: Path) -> None:
    import yaml
    from dstack._internal.core.models.configurations import parse_run_configuration

    parse_run_configuration(yaml.safe_load(path.read_text()))


def accelerate(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    kind = str(config.distributed_type)
    if kind not in {"DistributedType.DEEPSPEED", "DistributedType.MULTI_CPU"}:
        raise ValueError(f"distributed_type {kind}")


def torchtitan(path: Path) -> None:
    from torchtitan.config.manager import ConfigManager

    config = ConfigManager().parse_args(["--job.config_file", str(path)])
    if config.model.flavor not in _flavors(config.model.name):
        raise ValueError(f"no flavor {config.model.flavor} of {config.model.name}")
    p = config.parallelism
    if p.pipeline_parallel_degree > 1:
        from torch.distributed.pipelining.schedules import get_schedule_class

        get_schedule_class(p.pipeline_parallel_schedule)
    from torchtitan.distributed import ParallelDims

    world = int(re.search(r"on (\d+) ranks", path.read_text())[1])

    ParallelDims(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=p.data_parallel_shard_degree,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree,
        etp=p.expert_tensor_parallel_degree,
        world_size=world,
    )


def _flavors(model: str) -> set[str]:
    """Returns the flavors of a model as its package lists them, without importing it."""
    import torchtitan

    source = Path(torchtitan.__file__).parent / "models" / model / "__init__.py"
    tables = [n for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.Dict)]
    return {k.value for t in tables for k in t.keys if isinstance(k, ast.Constant)}


# Flag -> field of TransformerConfig, where the words differ by more than hyphens.
_FIELDS = {
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
    "tensor_model_parallel_size": "tensor_model_parallel_size",
    "qk_layernorm": "qk_layernorm",
    "swiglu": "gated_linear_unit",
    "bf16": "bf16",
}
# Flags of the training program that no model configuration holds (Megatron-LM's arguments.py).
_PROGRAM = {
    "max_position_embeddings",
    "vocab_size",
    "untie_embeddings_and_output_weights",
    "seq_length",
    "global_batch_size",
    "train_samples",
    "lr",
    "lr_warmup_samples",
    "lr_decay_style",
    "min_lr",
    "lr_wsd_decay_samples",
    "lr_wsd_decay_style",
    "optimizer",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
    "seed",
    "position_embedding_type",
    "use_rope_scaling",
    "rope_scaling_factor",
    "group_query_attention",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "num_layers_per_virtual_pipeline_stage",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "use_precision_aware_optimizer",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "accumulate_allreduce_grads_in_fp32",
    "micro_batch_size",
    "fp8_format",
    "fp4_format",
}


def megatron(path: Path) -> None:
    import dataclasses

    import torch
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    text = path.read_text()
    body = re.search(r"^MEGATRON_ARGS=\(\n(.*)^\)$", text, re.M | re.S)
    if body is None:
        raise ValueError("no MEGATRON_ARGS")
    flags = _flags(shlex.split(body[1]))
    mla = "multi_latent_attention" in flags
    config = MLATransformerConfig if mla else TransformerConfig
    known = {f.name for f in dataclasses.fields(config)}
    fields: dict[str, object] = {}
    for flag, value in flags.items():
        field = _FIELDS.get(flag, flag)
        if flag == "disable_bias_linear":
            fields["add_bias_linear"] = False
        elif field in known:
            fields[field] = value
        elif flag not in _PROGRAM and flag != "rotary_base":
            raise ValueError(f"unrecognized arguments: --{flag.replace('_', '-')}")
    if "bf16" in flags:
        fields["params_dtype"] = fields["pipeline_dtype"] = torch.bfloat16
    if flags.get("recompute_modules") is not None:
        modules = flags["recompute_modules"]
        fields["recompute_modules"] = modules if isinstance(modules, list) else [modules]
    if "fp8_format" in flags:
        fields["fp8"] = flags["fp8_format"]
    if "moe_layer_freq" in fields:
        fields["moe_layer_freq"] = _layers(str(fields["moe_layer_freq"]))
    if isinstance(fields.get("window_size"), str):
        fields["window_size"] = ast.literal_eval(f"({fields['window_size']})")
    if isinstance(fields.get("pipeline_model_parallel_layout"), str):
        # The program parses the layout with the size of the pipeline at hand.
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )

        layout = PipelineParallelLayerLayout.from_str(
            str(fields["pipeline_model_parallel_layout"]),
            int(str(fields["pipeline_model_parallel_size"])),
        )
        layout.validate_layer_layout(int(str(fields["num_layers"])), None)
        fields.pop("pipeline_model_parallel_layout")
    elif fields.get("pipeline_model_parallel_size", 1) != 1:
        stages = int(str(fields["pipeline_model_parallel_size"]))
        if int(str(fields["num_layers"])) % stages:
            raise ValueError("num_layers must be divisible by the pipeline's size")
    config(**fields)


def _flags(words: list[str]) -> dict[str, object]:
    out: dict[str, object] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            out[name] = True
            continue
        value: object
        try:
            value = json.loads(word)
        except json.JSONDecodeError:
            value = word
        before = out[name]
        if before is True:
            out[name] = value
        else:
            out[name] = [*(before if isinstance(before, list) else [before]), value]
    return out


def _layers(text: str) -> list[int]:
    out: list[int] = []
    for bit, count in re.findall(r"\[(\d)\]\*(\d+)", text):
        out += [int(bit)] * int(count)
    return out


def verl(path: Path) -> None:
    import importlib.util

    from hydra import compose, initialize_config_dir

    body = re.search(r"^VERL_ARGS=\(\n(.*)^\)$", path.read_text(), re.M | re.S)
    if body is None:
        raise ValueError("no VERL_ARGS")
    overrides = shlex.split(body[1])
    package = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    with initialize_config_dir(config_dir=str(package / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    for name in ("nnodes", "n_gpus_per_node", "total_training_steps"):
        if not isinstance(config.trainer[name], int):  # composing takes any type
            raise TypeError(f"trainer.{name}: {config.trainer[name]!r} is no number")
    from verl.utils.config import validate_config

    validate_config(config, use_reference_policy=True, use_critic=False)
    _fits_the_ranks(config)
    _megatron_core_takes(config)


def _fits_the_ranks(config: object) -> None:
    """What verl's checks leave to its workers: mini-batches that the ranks divide."""
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    if actor.strategy == "megatron":
        m = actor.megatron
        ranks //= m.tensor_model_parallel_size * m.pipeline_model_parallel_size
        ranks //= m.context_parallel_size
    else:
        ranks //= actor.ulysses_sequence_parallel_size
    if actor.ppo_mini_batch_size % (ranks * actor.ppo_micro_batch_size_per_gpu):
        raise ValueError("ppo_mini_batch_size must be divisible by ranks * micro batch")


def _megatron_core_takes(config: object) -> None:
    """Keys of the open records must be fields of Megatron Core's configurations."""
    actor = config.actor_rollout_ref.actor
    if actor.strategy != "megatron":
        return
    core = Path(sys.prefix).parent / "megatron" / "lib"
    found = next(core.glob("python3*/site-packages/megatron/core"), None)
    if found is None:
        raise ValueError("no Megatron Core beside this environment to know its fields by")
    for record, source in (
        (actor.megatron.override_transformer_config, "transformer/transformer_config.py"),
        (actor.optim.override_optimizer_config, "optimizer/optimizer_config.py"),
    ):
        tree = ast.parse((found / source).read_text())
        fields = {
            node.target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        unknown = set(record) - fields - {"attention_backend"}
        if unknown:
            raise ValueError(f"Megatron Core has no {', '.join(sorted(unknown))}")


CHECKS = {
    "accelerate": accelerate,
    "dstack": dstack,
    "kubeflow": kubeflow,
    "megatron": megatron,
    "skypilot": skypilot,
    "torchtitan": torchtitan,
    "verl": verl,
}


def words(target: str, path: Path) -> str:
    """Returns what the parser says against the file; "" if it takes it."""
    try:
        CHECKS[target](path)
    except SystemExit as error:  # command-line parsers leave by this door
        return f"left with {error.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    answers = {name: words(sys.argv[1], Path(name)) for name in sys.argv[2:]}
    print(json.dumps(answers))
