"""Adapters in the layout of the PEFT library, out and in (PEFT 0.21).

A folder with `adapter_model.safetensors` and `adapter_config.json`. A projection's matrices are
`<module>.lora_A.weight` [r, in] and `<module>.lora_B.weight` [out, r]. Experts are stacked
parameters of one module: theirs are [E * r, in], an expert behind the other, and [out, r * E],
the experts' columns in turn; gate and up, which PEFT wraps first, stand under `.base_layer`.
Module names are those of transformers 5, which parameters have here too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flopwright.errors import InputError, Violation
from flopwright.models.lora.module import adapt_, adapters, wanted
from flopwright.models.projection.module import Adapter
from flopwright.models.transformer.module import Stage
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import parameters
from flopwright.spec.workload import LoraTargets

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_OF_EXPERTS: Final = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
# Families whose modules transformers names and lays out as here.
FAMILIES: Final = (
    "deepseek_v3", "deepseek_v32", "glm4_moe", "llama", "minimax_m2", "mixtral", "qwen2", "qwen3",
    "qwen3_moe",
)  # fmt: skip


def _known(spec: ModelSpec) -> None:
    if spec.family not in FAMILIES:
        raise InputError(
            Violation(
                field="family", value=spec.family, limit=", ".join(FAMILIES),
                rule="its modules are laid out otherwise in transformers, which PEFT adapts",
            )
        )  # fmt: skip


def _path(name: str) -> str:
    """Returns PEFT's name of the module behind an adapted tensor, without its prefix."""
    path, leaf = name.rsplit(".", 1)
    return f"{path}.base_layer" if leaf == "gate_up_proj" else path


def _stored(name: str, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    down, up = adapter.down.detach(), adapter.up.detach()
    if down.ndim == 3:
        down, up = down.flatten(0, 1), up.permute(1, 2, 0).flatten(1)
    yield f"{_PREFIX}{_path(name)}.lora_A.weight", down.contiguous()
    yield f"{_PREFIX}{_path(name)}.lora_B.weight", up.contiguous()


def _config(found: Mapping[str, Adapter], base: str) -> dict[str, Any]:
    first = next(iter(found.values()))
    rank = first.down.shape[-2]
    stacked = [n for n, a in found.items() if a.down.ndim == 3]
    # Where there are experts PEFT takes any module of these names for theirs, whatever its path:
    # the others' matrices are named as parameters, whose adapters are laid out alike.
    apart = [n for n in found if stacked and n.endswith(_OF_EXPERTS)]
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": first.scale * rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(
            n.removesuffix(".weight") for n in found if n not in {*stacked, *apart}
        ),
        "target_parameters": sorted((*stacked, *apart)) or None,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def save_adapters(stage: Stage, folder: Path, base: str = "") -> None:
    """Writes the adapters of a stage that holds a whole model.

    Args:
        folder: new or empty.
        base: name or folder of the model they are for.

    Raises:
        InputError: a family that is laid out otherwise, a folder that holds something.
    """
    _known(stage.spec)
    found = dict(adapters(stage))
    assert found, "the stage has no adapters"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        rule = "there is something here already"
        raise InputError(Violation(file=str(folder), rule=rule, nearest_fix="name a new folder"))
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(pair for n, a in found.items() for pair in _stored(n, a))
    written = folder / f".{WEIGHTS_FILE}.tmp"
    save_file(tensors, written, metadata={"format": "pt"})
    written.replace(folder / WEIGHTS_FILE)
    text = json.dumps(_config(found, base), indent=2, sort_keys=True) + "\n"
    written = folder / f".{CONFIG_FILE}.tmp"
    written.write_text(text, encoding="utf-8")
    written.replace(folder / CONFIG_FILE)


def load_adapters_(stage: Stage, folder: Path) -> None:
    """Puts the adapters of a folder beside a stage's matrices; the model is then frozen.

    Raises:
        InputError: files that are missing or broken; settings that mean another product; and
            every tensor that is missing, unexpected or of a wrong shape.
    """
    _known(stage.spec)
    config, tensors = _read(folder)
    rank, targets = _checked(config, folder), _targets(stage, tensors)
    if targets is None:
        rule = "must adapt all matrices but routers, those of attention, or queries to values"
        raise InputError(Violation(file=str(folder / WEIGHTS_FILE), rule=rule))
    adapt_(stage, rank, alpha=float(config["lora_alpha"]), targets=targets)
    found, wrong = dict(adapters(stage)), []
    for name, adapter in found.items():
        for key, own in _stored(name, adapter):
            given = tensors.pop(key, None)
            if given is None or given.shape != own.shape:
                shape = "missing" if given is None else str(list(given.shape))
                wrong.append(_wrong(folder, key, shape, f"must be {list(own.shape)}"))
            else:
                _fill_(adapter, key, given)
    wrong += [_wrong(folder, key, "", "the model has no such adapter") for key in tensors]
    if wrong:
        raise InputError(wrong)


@torch.no_grad()
def _fill_(adapter: Adapter, key: str, given: Tensor) -> None:
    if key.endswith("lora_A.weight"):
        adapter.down.copy_(given.view(adapter.down.shape))
        return
    if adapter.up.ndim == 3:
        experts, out, rank = adapter.up.shape
        given = given.view(out, rank, experts).permute(2, 0, 1)
    adapter.up.copy_(given)


def _wrong(folder: Path, field: str, value: str, rule: str) -> Violation:
    return Violation(file=str(folder / WEIGHTS_FILE), field=field, value=value, rule=rule)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise InputError(Violation(file=str(folder / name), rule="no such file"))
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        rule = f"is no JSON: {error}"
        raise InputError(Violation(file=str(folder / CONFIG_FILE), rule=rule)) from error
    if not isinstance(config, dict):
        raise InputError(Violation(file=str(folder / CONFIG_FILE), rule="must be an object"))
    try:
        return config, load_file(folder / WEIGHTS_FILE)
    except SafetensorError as error:
        rule = f"cannot be read: {error}"
        raise InputError(Violation(file=str(folder / WEIGHTS_FILE), rule=rule)) from error


_PLAIN: Final[dict[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}


def _checked(config: Mapping[str, Any], folder: Path) -> int:
    """Returns the rank of a config whose product is the one here."""
    wrong = [
        Violation(
            file=str(folder / CONFIG_FILE), field=name, value=json.dumps(config[name]),
            rule="adapters of that kind are not read", limit=json.dumps(allowed[0]),
        )
        for name, allowed in _PLAIN.items()
        if name in config and config[name] not in allowed
    ]  # fmt: skip
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            rule = "must be a positive number"
            wrong.append(
                Violation(
                    file=str(folder / CONFIG_FILE), field=name, value=json.dumps(value), rule=rule
                )
            )
    if wrong:
        raise InputError(wrong)
    return int(config["r"])


def _targets(stage: Stage, tensors: Mapping[str, Tensor]) -> LoraTargets | None:
    """Returns which of the workload's choices the folder's tensors are; None for another."""
    given = {key.removeprefix(_PREFIX).rsplit(".lora_", 1)[0] for key in tensors}
    choices: tuple[LoraTargets, ...] = ("all", "attention", "qkv")
    for targets in choices:
        if given == {_path(p.name) for p in parameters(stage.spec) if wanted(p, targets)}:
            return targets
    return None
