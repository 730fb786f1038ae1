"""Rotary embedding settings of a config.json, in and out.

Two layouts are read: `rope_theta` beside `rope_scaling` (every released config), and
`rope_parameters` with both inside (what transformers 5 writes). The first one is written:
transformers 4 and 5 and the serving engines read it.
"""

from __future__ import annotations

from typing import Any

from flopwright.models.hf.fields import Fields
from flopwright.spec.model import (
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

_KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(fields: Fields, default_theta: float, default_fraction: float = 0.0) -> Rope:
    """Returns the rotary embedding that a config's fields describe.

    Args:
        default_fraction: share of a head that is turned where none is given; 0: this family
            turns all of it.
    """
    theta = fields.number("rope_theta", default_theta)
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    fields.harmless(("rope_parameters", "rope_scaling"))
    if fields.has("rope_parameters") and fields.has("rope_scaling"):
        fields.refuse("rope_scaling", "stands beside rope_parameters; only one can hold")
    section = fields.section(name)
    fraction = _fraction(fields, default_fraction or 1.0, bool(default_fraction))
    if section is None:
        return Rope(theta=theta, fraction=fraction)
    theta = section.number("rope_theta", theta)
    fraction = _fraction(section, fraction, bool(default_fraction))
    scaling = _scaling(section)
    section.close()
    return Rope(theta=theta, scaling=scaling, fraction=fraction)


def _fraction(fields: Fields, default: float, free: bool) -> float:
    if not fields.has("partial_rotary_factor"):
        return default
    fraction = fields.number("partial_rotary_factor", default)
    if fraction > 1 or (fraction != 1 and not free):
        fields.refuse("partial_rotary_factor", "a part of the head cannot be left unrotated")
        return default
    return fraction


def _scaling(section: Fields) -> RopeScaling | None:
    key = "rope_type" if section.has("rope_type") else "type"
    section.harmless(("rope_type", "type"))
    kind = section.raw(key) or "default"
    if kind not in _KINDS:
        section.refuse(key, "not a known rope scaling", f"known: {', '.join(_KINDS)}")
        return None
    if kind == "default":
        # Written by some tools beside the default type; they are not read there.
        section.harmless(("factor", "original_max_position_embeddings"))
        return None
    factor = section.number("factor")
    if kind == "linear":
        section.harmless(("original_max_position_embeddings",))
        return LinearScaling(kind="linear", factor=factor)
    original = section.integer("original_max_position_embeddings")
    if kind == "llama3":
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        if low >= high:
            section.refuse("low_freq_factor", f"must be below high_freq_factor ({high:g})")
            return None
        return Llama3Scaling(
            kind="llama3",
            factor=factor,
            original_max_seq_len=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return _yarn(section, factor, original)


def _yarn(section: Fields, factor: float, original: int) -> YarnScaling:
    truncate = section.flag("truncate", True)
    if section.has("attention_factor"):
        section.raw("attention_factor")
        section.refuse(
            "attention_factor", "is derived from factor and mscale, not free", "leave it out"
        )
    if section.has("mscale") != section.has("mscale_all_dim"):
        name = "mscale" if section.has("mscale") else "mscale_all_dim"
        section.refuse(name, "mscale and mscale_all_dim must stand together", "give both")
    # A weight of 0 counts as absent in transformers: then cos and sin take m(factor, 1).
    all_dim = section.number("mscale_all_dim", 0.0) if section.raw("mscale_all_dim") else 0.0
    mscale = section.number("mscale", 1.0) if all_dim else 1.0
    section.harmless(("mscale", "mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_max_seq_len=original,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        mscale=mscale,
        mscale_all_dim=all_dim,
        truncate=truncate,
    )


def rope_fields(rope: Rope) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling` of a rotary embedding."""
    part = {} if rope.fraction == 1 else {"partial_rotary_factor": rope.fraction}
    return {"rope_theta": rope.theta, "rope_scaling": _scaling_fields(rope.scaling), **part}


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    out: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if isinstance(scaling, LinearScaling):
        return out
    out["original_max_position_embeddings"] = scaling.original_max_seq_len
    if isinstance(scaling, Llama3Scaling):
        out["low_freq_factor"] = scaling.low_freq_factor
        out["high_freq_factor"] = scaling.high_freq_factor
        return out
    out["beta_fast"], out["beta_slow"] = scaling.beta_fast, scaling.beta_slow
    if not scaling.truncate:
        out["truncate"] = False
    if scaling.mscale_all_dim or scaling.mscale != 1.0:
        out["mscale"], out["mscale_all_dim"] = scaling.mscale, scaling.mscale_all_dim
    return out
