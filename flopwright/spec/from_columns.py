"""A model of which only the columns of a table are known; whatever they leave open is named.

Published measurements give a hidden size, layers, heads, widths, experts and a vocabulary,
rarely more, and often with gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from flopwright.errors import InputError, Violation
from flopwright.spec.model import ModelSpec
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import Document

USUAL_HEAD_DIM: Final = 128
GPT_VOCAB: Final = 51_200  # GPT-2's 50,257 as Megatron pads it for 8-way tensor parallelism
LLAMA_VOCAB: Final = 32_000
GPT_SEQ_LEN: Final = 2048
LLAMA_SEQ_LEN: Final = 4096
# The block around the matrices. "gpt": GELU, LayerNorm, biases, learned positions, tied head.
# "mpt": the same without biases. "nemotron": no gate, LayerNorm, rotary positions, no biases,
# untied head. "llama": SwiGLU, RMSNorm, rotary positions, no biases, untied head.
Style = Literal["gpt", "mpt", "nemotron", "llama"]


@dataclass(frozen=True, slots=True)
class ColumnModel:
    """A model from columns.

    Attributes:
        assumptions: what the columns did not say, one sentence each.
    """

    spec: ModelSpec
    assumptions: tuple[str, ...]


@dataclass(slots=True)
class _Guess:
    """Assumptions made so far."""

    made: list[str] = field(default_factory=list)

    def number(self, given: int | None, assumed: int, words: str) -> int:
        """Returns the given number; without one the assumed, with its words noted."""
        if given is not None:
            return given
        self.made.append(f"{words} ({assumed})")
        return assumed


def model_from_columns(
    hidden: int,
    layers: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    ffn: int | None = None,
    experts: int | None = None,
    topk: int | None = None,
    moe_ffn: int | None = None,
    vocab: int | None = None,
    *,
    max_seq_len: int | None = None,
    name: str | None = None,
    style: Style | None = None,
    head_dim: int | None = None,
    latent: Mapping[str, int | None] | None = None,
    shared_experts: int = 0,
    first_dense_layers: int = 0,
    tied: bool | None = None,
    attention_bias: bool | None = None,
    qk_norm: bool = False,
    router: Literal["sigmoid_noaux_tc", "softmax"] = "softmax",
) -> ColumnModel:
    """Returns the model that a table row describes, and what had to be assumed.

    Two kinds are told apart. GPT: the feed-forward width is 4 * hidden, or neither it nor
    KV heads nor experts are given; then GELU, LayerNorm, biases, learned positions and a
    tied head. Otherwise Llama: SwiGLU, RMSNorm, rotary positions, no biases, an untied head;
    with experts, every layer has them, chosen by a softmax (Mixtral). What is known of a
    model beyond its columns is given by keyword, and then not assumed.

    Args:
        hidden: hidden size; `layers`: number of layers.
        heads: by default as many as give a head width near 128.
        kv_heads: by default `heads`.
        ffn: width of the dense feed-forward block; by default 4 * hidden (GPT), or 8/3 * hidden
            rounded up to a multiple of 256 (Llama).
        experts: routed experts a layer, `topk` of them chosen, each `moe_ffn` wide.
        vocab: by default 51,200 (GPT) or 32,000 (Llama).
        style: the block; None tells GPT from Llama as above.
        head_dim: width of a head; by default hidden / heads.
        latent: ranks and widths of latent attention (fields of MlaAttention, but for its heads).
        shared_experts, first_dense_layers, router: of a model with experts.
        tied, attention_bias, qk_norm: None takes the style's.

    Raises:
        InputError: columns that contradict each other.
    """
    columns = {
        "hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn": ffn,
        "experts": experts, "topk": topk, "moe_ffn": moe_ffn, "vocab": vocab,
    }  # fmt: skip
    _check(columns)
    guess = _Guess()
    gpt = experts is None and (ffn == 4 * hidden or (ffn is None and kv_heads is None))
    style = style or ("gpt" if gpt else "llama")
    gpt = style in ("gpt", "mpt")
    block = _llama(hidden, ffn or moe_ffn, guess) if style == "llama" else None
    data: dict[str, Any] = {
        "name": name or f"{'gpt' if gpt else 'moe' if experts else 'llama'}_h{hidden}_l{layers}",
        "hidden_size": hidden,
        "num_layers": layers,
        "attention": _attention(hidden, heads, kv_heads, head_dim, latent, guess),
        **(block or _ungated(style, hidden, ffn, guess)),
    }
    if tied is not None:
        data["tied_embeddings"] = tied
    if experts is not None:
        data["family"] = "mixtral"
        width = data["mlp"]["intermediate_size"]
        data["moe"] = _moe(width, experts, topk, moe_ffn, guess) | {
            "num_shared_experts": shared_experts,
            "first_dense_layers": first_dense_layers,
            "router": router,
        }
        if not first_dense_layers and not shared_experts:
            guess.made.append("experts in every layer, none shared, softmax router")
        if not first_dense_layers and moe_ffn and ffn and ffn != moe_ffn:
            guess.made.append(f"no layer is dense, although a dense width ({ffn}) is given")
    data["attention"] |= _attention_extras(style, latent is not None, attention_bias, qk_norm)
    data["vocab_size"] = guess.number(vocab, GPT_VOCAB if gpt else LLAMA_VOCAB, "vocabulary")
    data["max_seq_len"] = max_seq_len or (GPT_SEQ_LEN if gpt else LLAMA_SEQ_LEN)
    data["source"] = "columns of a table; assumed: " + "; ".join(guess.made)
    spec = validate(ModelSpec, Document(data=data, lines={}, file=""))
    return ColumnModel(spec, tuple(guess.made))


def _check(columns: dict[str, int | None]) -> None:
    wrong = [
        Violation(field=name, value=repr(value), rule="must be a positive integer")
        for name, value in columns.items()
        if value is not None and (type(value) is not int or value < 1)
    ]
    if not wrong and columns["experts"] is None:
        wrong = [
            Violation(field=name, value=repr(columns[name]), rule="given without experts")
            for name in ("topk", "moe_ffn")
            if columns[name] is not None
        ]
    if wrong:
        raise InputError(wrong)


def _attention(
    hidden: int,
    heads: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    latent: Mapping[str, int | None] | None,
    guess: _Guess,
) -> dict[str, Any]:
    if head_dim is not None and heads is None:
        heads = guess.number(None, max(1, hidden // head_dim), f"heads of width {head_dim}")
    if head_dim is not None or latent is not None:
        width = head_dim or 0
    elif heads is None:
        usual = [d for d in range(8, hidden + 1, 8) if hidden % d == 0] or [hidden]
        width = min(usual, key=lambda d: (abs(d - USUAL_HEAD_DIM), d))
        heads = guess.number(None, hidden // width, f"heads of width {width}")
    else:
        width = max(2, hidden // heads // 2 * 2)  # rotary embeddings turn pairs
        exact = "" if width * heads == hidden else ", down to an even number"
        guess.made.append(f"head width hidden / heads{exact} ({width})")
    if heads is None:
        heads = guess.number(None, max(1, hidden // USUAL_HEAD_DIM), "heads")
    if latent is not None:
        return {"kind": "mla", "num_heads": heads, **latent}
    return {
        "kind": "gqa",
        "num_heads": heads,
        "num_kv_heads": guess.number(kv_heads, heads, "as many KV heads as heads"),
        "head_dim": width,
    }


def _ungated(style: Style, hidden: int, ffn: int | None, guess: _Guess) -> dict[str, Any]:
    width = guess.number(ffn, 4 * hidden, "feed-forward width 4 * hidden")
    learned, bias = style != "nemotron", style == "gpt"
    if bias:
        guess.made.append("GPT: GELU, LayerNorm, biases, learned positions, tied head")
    return {
        "family": "gpt2" if learned else "llama",
        "norm": "layer_norm",
        "norm_eps": 1e-5,
        "positions": "learned" if learned else "rope",
        "tied_embeddings": learned,
        "mlp": {"kind": "gelu", "intermediate_size": width, "bias": bias},
    }


def _attention_extras(
    style: Style, latent: bool, bias: bool | None, qk_norm: bool
) -> dict[str, Any]:
    if latent:
        return {}
    bias = style == "gpt" if bias is None else bias
    extras: dict[str, Any] = {"bias": bias, "o_bias": style == "gpt", "qk_norm": qk_norm}
    return extras | ({"rope": None} if style in ("gpt", "mpt") else {})


def _llama(hidden: int, ffn: int | None, guess: _Guess) -> dict[str, Any]:
    usual = -(-8 * hidden // 3 // 256) * 256
    width = guess.number(ffn, usual, "feed-forward width 8/3 * hidden, up to a multiple of 256")
    guess.made.append("Llama: SwiGLU, RMSNorm, rotary positions, no biases, untied head")
    return {
        "family": "llama",
        "norm_eps": 1e-5,
        "mlp": {"kind": "swiglu", "intermediate_size": width},
    }


def _moe(
    dense: int, experts: int, topk: int | None, moe_ffn: int | None, guess: _Guess
) -> dict[str, Any]:
    return {
        "num_experts": experts,
        "top_k": guess.number(topk, min(2, experts), "chosen experts"),
        "expert_intermediate_size": guess.number(
            moe_ffn, dense, "an expert as wide as the dense block"
        ),
    }
