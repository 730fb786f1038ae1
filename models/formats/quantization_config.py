"""What a config.json says of a release's format, in and out. No torch."""

from __future__ import annotations

from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.models.formats.layout import LAYOUTS, Layout, LayoutName
from flopwright.spec.formats import BLOCK_FP8, INT4_G32

KEY: Final = "quantization_config"
Config = dict[str, Any]

# What a release in a format of the experts alone leaves as it is: compressed-tensors' patterns.
_IGNORED: Final = (
    "lm_head",
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*\.(gate|router)$",
    r"re:.*routed_expert_(up|down)_proj.*",
    r"re:.*(vision|projector).*",
    r"re:.*(eh_proj|_res_proj|embed_tokens|shared_head).*",
)
_INT4_WEIGHTS: Final[Config] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": INT4_G32.block[1],
    "dynamic": False,
}
_MXFP4_WEIGHTS: Final[Config] = {
    **_INT4_WEIGHTS,
    "type": "float",
    "scale_dtype": "torch.uint8",
    "zp_dtype": "torch.uint8",
}
_FORMATS: Final[dict[str, tuple[LayoutName, Config]]] = {
    "pack-quantized": ("int4_g32", _INT4_WEIGHTS),
    "mxfp4-pack-quantized": ("mxfp4", _MXFP4_WEIGHTS),
}


def quantization_config(layout: Layout, kept: tuple[str, ...] = ()) -> Config:
    """Returns the quantization_config of a release in this layout.

    Args:
        kept: modules with a matrix that stays as it is, beyond tables, heads and routers.
    """
    if layout.name == "block_fp8":
        config: Config = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK_FP8.block),
        }
        return {**config, "modules_to_not_convert": ["lm_head", *kept]} if kept else config
    if layout.name == "mxfp4_blocks":
        names = ("self_attn", "mlp.router")
        kept = (*(f"model.layers.*.{n}" for n in names), "model.embed_tokens", "lm_head")
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(kept)}
    form, weights = next((f, w) for f, (name, w) in _FORMATS.items() if name == layout.name)
    group = {"targets": ["Linear"], "weights": dict(weights)}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {
            "group_0": {**group, "input_activations": None, "output_activations": None}
        },
        "ignore": list(_IGNORED),
        "kv_cache_scheme": None,
    }


def find(config: Config) -> Config | None:
    """Returns the quantization_config of a config.json, or of the text model in it."""
    for place in (config, config.get("text_config")):
        if isinstance(place, dict) and place.get(KEY) is not None:
            found = place[KEY]
            return found if isinstance(found, dict) else {"": found}
    return None


def with_format(config: Config, said: Config | None) -> Config:
    """Returns a config.json whose weights are in another format (None: bf16)."""
    out = {k: v for k, v in config.items() if k != KEY}
    text = out.get("text_config")
    if isinstance(text, dict):
        out["text_config"] = {k: v for k, v in text.items() if k != KEY}
    return out if said is None else {**out, KEY: said}


def layout_of(config: Config, file: str = "") -> Layout | None:
    """Returns the layout that a config.json names, None where weights are not quantised.

    Raises:
        InputError: a method, or a variant of one, that is not known.
    """
    said = find(config)
    if said is None:
        return None
    method = said.get("quant_method")
    if method == "fp8":
        return _fp8(said, file)
    if method == "mxfp4":
        return LAYOUTS["mxfp4_blocks"]
    if method == "compressed-tensors":
        return _compressed(said, file)
    raise _refuse(
        file, "quant_method", method, "no such format is known", "fp8, mxfp4, compressed-tensors"
    )


def _refuse(file: str, field: str, value: Any, rule: str, limit: str) -> InputError:
    field = f"{KEY}.{field}"
    return InputError(Violation(file=file, field=field, value=repr(value), rule=rule, limit=limit))


def _fp8(said: Config, file: str) -> Layout:
    block = list(BLOCK_FP8.block)
    if said.get("weight_block_size") != block:
        value, rule = said.get("weight_block_size"), "other scales than blocks' cannot be read"
        raise _refuse(file, "weight_block_size", value, rule, f"only {block}")
    if said.get("fmt", "e4m3") != "e4m3":
        raise _refuse(file, "fmt", said.get("fmt"), "other numbers cannot be read", "only e4m3")
    return LAYOUTS["block_fp8"]


def _compressed(said: Config, file: str) -> Layout:
    groups = said.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    if len(groups) != 1 or not isinstance(groups[0], dict):
        rule = "weights of one kind can be read"
        raise _refuse(file, "config_groups", f"{len(groups)} groups", rule, "one group")
    form = groups[0].get("format") or said.get("format")
    if form not in _FORMATS:
        raise _refuse(file, "format", form, "no such format is known", ", ".join(_FORMATS))
    name, wanted = _FORMATS[form]
    weights = groups[0].get("weights")
    weights = weights if isinstance(weights, dict) else {}
    for field in ("num_bits", "type", "symmetric", "strategy", "group_size"):
        default = True if field == "symmetric" else None
        if weights.get(field, default) != wanted[field]:
            path, value = f"config_groups.group_0.weights.{field}", weights.get(field)
            raise _refuse(file, path, value, "cannot be read", f"only {wanted[field]!r}")
    return LAYOUTS[name]
