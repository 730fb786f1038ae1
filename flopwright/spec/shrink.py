"""A small model of the same family and proportions, that trains on a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.spec.model import GqaAttention, KdaAttention, MlaAttention, ModelSpec, Moe
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import Document

WIDTH_STEP: Final = 8  # widths stay multiples of it, so that vector units are filled
DEFAULT_VOCAB: Final = 4096
DEFAULT_SEQ_LEN: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """What was asked for; None leaves a value to the proportions."""

    hidden_size: int
    num_layers: int
    num_experts: int | None
    top_k: int | None


def shrunk(
    spec: ModelSpec,
    *,
    hidden_size: int,
    num_layers: int,
    vocab_size: int | None = None,
    max_seq_len: int | None = None,
    num_experts: int | None = None,
    top_k: int | None = None,
    name: str | None = None,
) -> ModelSpec:
    """Returns a model of the same kinds of blocks, its widths in the proportions of `spec`.

    With s = hidden_size / spec.hidden_size: feed-forward widths and ranks scale by s, the
    number of heads and their width by sqrt(s) each, so that all heads together keep their
    share of the hidden size. Queries a key-value head, routed experts a chosen one, chosen
    groups a group, and the order of head widths stay; every width is a multiple of 8 and at
    least 8, the number of key-value heads a power of two. Dense layers at the front stay as
    many, as long as one layer with experts is left. At the model's own hidden size widths,
    heads and experts stay as they are.

    Args:
        hidden_size: even, at most the model's own.
        num_layers: at most the model's own.
        vocab_size: by default 4096, or the model's own if smaller.
        max_seq_len: by default 1024, or the model's own if smaller; a context extension and
            a sliding window shrink with it.
        num_experts: by default 2 * sparsity, so that 2 of them are chosen.
        top_k: by default 2 (1 where the model chooses 1), or num_experts / sparsity.
        name: by default the model's name and the new size.

    Raises:
        InputError: a size above the model's own, or below what the proportions need.
    """
    wanted = {
        "hidden_size": (hidden_size, spec.hidden_size),
        "num_layers": (num_layers, spec.num_layers),
        "vocab_size": (vocab_size, spec.vocab_size),
        "max_seq_len": (max_seq_len, spec.max_seq_len),
        "num_experts": (num_experts, spec.moe.num_experts if spec.moe else None),
        "top_k": (top_k, spec.moe.top_k if spec.moe else None),
    }
    _check(wanted)
    size = _Size(
        hidden_size=hidden_size, num_layers=num_layers, num_experts=num_experts, top_k=top_k
    )
    seq_len = max_seq_len or min(DEFAULT_SEQ_LEN, spec.max_seq_len)
    data = spec.to_data()
    data |= {
        "name": name or f"{spec.name}_h{hidden_size}_l{num_layers}",
        "source": f"{spec.name}, shrunk to hidden size {hidden_size} and {num_layers} layers",
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "vocab_size": vocab_size or min(DEFAULT_VOCAB, spec.vocab_size),
        "max_seq_len": seq_len,
    }
    scale = hidden_size / spec.hidden_size
    if scale != 1:
        data.pop("vision", None)  # a small text model, by itself
    data["mlp"]["intermediate_size"] = _width(spec.mlp.intermediate_size, scale)
    data["attention"] |= _attention(spec, size)
    _shorten(data["attention"], seq_len / spec.max_seq_len)
    if spec.linear_attention is not None:
        data["linear_attention"] |= _linear(spec.linear_attention, scale)
        data["full_attention_layers"] = _full_layers(spec, num_layers)
    if spec.attn_res_block is not None:
        share = num_layers / spec.num_layers
        data["attn_res_block"] = max(1, round(spec.attn_res_block * share))
    if spec.moe is not None:
        data["moe"] |= _moe(spec.moe, scale, size)
    return validate(ModelSpec, Document(data=data, lines={}, file=""))


def _check(wanted: dict[str, tuple[int | None, int | None]]) -> None:
    wrong = []
    for name, (value, most) in wanted.items():
        if value is None:
            continue
        if most is None:
            wrong.append(_refused(name, value, "the model has no experts"))
        elif value < 1:
            wrong.append(_refused(name, value, "must be positive"))
        elif value > most:
            wrong.append(_refused(name, value, "a shrunk model is not larger", str(most)))
    hidden = wanted["hidden_size"][0] or 0
    if hidden % 2:
        wrong.append(_refused("hidden_size", hidden, "must be even", str(hidden + 1)))
    experts, chosen = wanted["num_experts"][0], wanted["top_k"][0]
    if experts and chosen and chosen > experts:
        wrong.append(_refused("top_k", chosen, "must not exceed num_experts", str(experts)))
    if wrong:
        raise InputError(wrong)


def _refused(field: str, value: int, rule: str, limit: str = "") -> Violation:
    return Violation(field=field, value=str(value), rule=rule, limit=limit)


def _width(value: int, scale: float) -> int:
    """Returns value * scale as a multiple of WIDTH_STEP, at least one; unscaled as it is."""
    return value if scale == 1 else max(WIDTH_STEP, WIDTH_STEP * round(value * scale / WIDTH_STEP))


def _power_of_two(value: int, scale: float) -> int:
    """Returns value * scale as a power of two, so that tensor parallelism divides it."""
    return value if scale == 1 else min(value, 2 ** max(0, round(math.log2(value * scale))))


def _attention(spec: ModelSpec, size: _Size) -> dict[str, Any]:
    """Returns the heads: fewer by sqrt(s), and narrower by what is then left of s."""
    attn, scale = spec.attention, size.hidden_size / spec.hidden_size
    group = attn.num_heads // attn.num_kv_heads if isinstance(attn, GqaAttention) else 1
    heads = group * _power_of_two(attn.num_heads // group, math.sqrt(scale))
    narrower = scale * attn.num_heads / heads
    if isinstance(attn, MlaAttention):
        out: dict[str, Any] = {
            field: _width(getattr(attn, field), narrower)
            for field in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        }
        for field in ("q_lora_rank", "kv_lora_rank"):
            rank = getattr(attn, field)
            if rank is not None:
                out[field] = _width(rank, scale)
        if attn.indexer is not None:
            index = attn.indexer
            out["indexer"] = index.to_data() | {
                "num_heads": _power_of_two(index.num_heads, math.sqrt(scale)),
                "head_dim": max(out["qk_rope_head_dim"], _width(index.head_dim, narrower)),
            }
        return {"num_heads": heads, **out}
    out = {
        "num_heads": heads,
        "num_kv_heads": heads // group,
        "head_dim": _width(attn.head_dim, narrower),
    }
    if attn.sliding_window is not None:
        share = attn.first_window_layer / spec.num_layers
        out["first_window_layer"] = min(round(share * size.num_layers), size.num_layers - 1)
    return out


def _linear(attn: KdaAttention, scale: float) -> dict[str, Any]:
    """Returns the heads of linear attention, shrunk as those of the other kind."""
    heads = _power_of_two(attn.num_heads, math.sqrt(scale))
    out: dict[str, Any] = {
        "num_heads": heads,
        "head_dim": _width(attn.head_dim, scale * attn.num_heads / heads),
    }
    for field in ("gate_rank", "output_gate_rank"):
        rank = getattr(attn, field)
        if rank is not None:
            out[field] = _width(rank, scale)
    return out


def _full_layers(spec: ModelSpec, num_layers: int) -> list[int]:
    """Returns where full attention stands: as often as before, and in the last layer."""
    full = spec.full_attention_layers or ()
    if num_layers == spec.num_layers:
        return list(full)
    period = max(1, round(spec.num_layers / len(full)))
    return sorted({*range(period - 1, num_layers, period), num_layers - 1})


def _shorten(attention: dict[str, Any], share: float) -> None:
    """Shrinks what is counted in positions by the share of the context that is left."""
    scaling = (attention.get("rope") or {}).get("scaling")
    if scaling is not None and "original_max_seq_len" in scaling:
        original = round(scaling["original_max_seq_len"] * share)
        scaling["original_max_seq_len"] = max(1, original)
    if attention.get("sliding_window") is not None:
        attention["sliding_window"] = max(1, round(attention["sliding_window"] * share))
    if attention.get("indexer") is not None:
        index = attention["indexer"]
        index["top_k"] = max(1, round(index["top_k"] * share))


def _moe(moe: Moe, scale: float, size: _Size) -> dict[str, Any]:
    """Returns the experts: as sparse as before, unless told how many there are."""
    num_experts, top_k = size.num_experts, size.top_k
    if scale == 1 and num_experts is None and top_k is None:
        num_experts, top_k = moe.num_experts, moe.top_k
    if top_k is None:
        top_k = min(moe.top_k, 2)
        if num_experts is not None:
            top_k = min(num_experts, max(top_k, round(num_experts / moe.sparsity)))
    if num_experts is None:
        # Each group needs two experts, for the sum of its two best scores is its score.
        least = moe.num_groups * min(2, moe.num_experts // moe.num_groups)
        num_experts = min(moe.num_experts, max(round(top_k * moe.sparsity), top_k, least))
        num_experts += -num_experts % moe.num_groups
    groups = max(
        g
        for g in range(1, moe.num_groups + 1)
        if num_experts % g == 0 and (g == 1 or num_experts // g >= 2)
    )
    chosen = max(1, round(groups * moe.top_k_groups / moe.num_groups))
    chosen = max(chosen, math.ceil(top_k * groups / num_experts))
    width = moe.latent_size
    latent = {} if width is None else {"latent_size": _width(width, scale)}
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "expert_intermediate_size": _width(moe.expert_intermediate_size, scale),
        "first_dense_layers": min(moe.first_dense_layers, size.num_layers - 1),
        "num_groups": groups,
        "top_k_groups": chosen,
        **latent,
    }
