"""Which released tensor holds which part of which tensor of the parameter list. No torch.

Released checkpoints hold one tensor a projection and expert; here a layer's experts are
stacked, gate rows above up rows. GPT-2 holds matrices transposed, its query, key and value
in one; gpt-oss holds stacked experts, transposed, gate and up rows in turn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import ParamTensor, layer_parameters


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [first, last) of a tensor; of its expert number `expert` where experts are stacked."""

    name: str
    expert: int | None
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a released checkpoint: its parts below each other.

    Attributes:
        shape: in the file.
        transposed: whether the file holds the parts' stack (or each matrix of a stack of
            experts) transposed.
        stacked: the parts are experts, stacked along a dimension of their own.
        alternating: gate and up rows of an expert alternate.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    transposed: bool = False
    stacked: bool = False
    alternating: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Experts:
    """How a family names the three matrices of expert `e`, and its router.

    Attributes:
        prefix: what all of its names begin with.
        bias: what stands before the selection bias in its name.
    """

    block: str
    gate: str
    up: str
    down: str
    prefix: str = ""
    bias: str = "gate."


_PLAIN: Final = _Experts("mlp", "gate_proj", "up_proj", "down_proj")
_LAYOUTS: Final[dict[str, _Experts]] = {
    "deepseek_v3": _PLAIN,
    "deepseek_v32": _PLAIN,
    "llama": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3_moe": _PLAIN,
    "mixtral": _Experts("block_sparse_moe", "w1", "w3", "w2"),
    "glm4_moe": _PLAIN,
    "minimax_m2": _Experts("block_sparse_moe", "w1", "w3", "w2", bias=""),
    "kimi_linear": _Experts("block_sparse_moe", "w1", "w3", "w2"),
    "kimi_k3": _Experts("block_sparse_moe", "w1", "w3", "w2", "language_model."),
}

_OWN_LAYOUTS: Final = ("gpt2", "gpt_oss")

_OF_EXPERTS: Final = frozenset({"router", "shared_expert", "latent"})

# Buffers that old releases saved and that follow from the config: never weights.
_DERIVED: Final = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias|rotary_emb\.(cos|sin)_cached)$"
)


def is_derived(name: str) -> bool:
    """Returns whether a stored tensor is a buffer that follows from the config."""
    return _DERIVED.search(name) is not None


def is_padded(stored: Stored) -> bool:
    """Returns whether releases may hold zeros behind the tensor (Kimi K3: 96 heads as 128)."""
    return stored.name.startswith("language_model.") and stored.name.endswith(".A_log")


def stored_tensors(spec: ModelSpec, layers: Iterable[int] | None = None) -> Iterator[Stored]:
    """Yields the tensors of a released checkpoint of this model, embeddings first.

    A tied head is not stored.

    Args:
        layers: which layers' (-1 the embeddings, num_layers the final norm and head); all by
            default.

    Raises:
        InputError: no layout is known for the family.
    """
    if spec.family not in (*_LAYOUTS, *_OWN_LAYOUTS):
        raise InputError(
            Violation(
                field="family",
                value=repr(spec.family),
                rule="there is no checkpoint layout for it",
                nearest_fix=did_you_mean(spec.family, (*_LAYOUTS, *_OWN_LAYOUTS)),
            )
        )
    for layer in range(-1, spec.num_layers + 1) if layers is None else layers:
        tensors = [p for p in layer_parameters(spec, layer) if not p.tied]
        if spec.family == "gpt2":
            yield from _gpt2(tensors)
        elif spec.family == "gpt_oss":
            yield from map(_gpt_oss, tensors)
        else:
            for p in tensors:
                yield from _stored(p, _LAYOUTS[spec.family])


def _whole(p: ParamTensor) -> Part:
    return Part(p.name, None, 0, p.shape[0])


def _stored(p: ParamTensor, layout: _Experts) -> Iterator[Stored]:
    """Yields the stored tensors of one tensor in the layouts that name projections alike."""
    if p.role != "expert":
        name = layout.prefix + p.name
        if p.role in _OF_EXPERTS or ".routed_expert_norm." in name:
            name = name.replace(".mlp.", f".{layout.block}.")
            name = name.replace("gate.e_score", f"{layout.bias}e_score")
        # Kimi Linear keeps one number a head as [1, 1, heads, 1].
        turned = not layout.prefix and name.endswith(".A_log")
        yield Stored(name, (1, 1, *p.shape, 1) if turned else p.shape, (_whole(p),))
        return
    prefix, leaf = (layout.prefix + p.name).replace(".mlp.", f".{layout.block}.").rsplit(".", 1)
    experts, rows, columns = p.shape
    pieces = [(layout.down, 0, rows)]
    if leaf == "gate_up_proj":
        pieces = [(layout.gate, 0, rows // 2), (layout.up, rows // 2, rows)]
    for e in range(experts):
        for matrix, first, last in pieces:
            part = Part(p.name, e, first, last)
            name = f"{prefix}.{e}.{matrix}.weight"
            yield Stored(name, (last - first, columns), (part,))


def _gpt_oss(p: ParamTensor) -> Stored:
    """Returns the stored tensor of one tensor in gpt-oss's layout: experts stay stacked."""
    if p.role != "expert":
        return Stored(p.name.replace(".mlp.gate.", ".mlp.router."), p.shape, (_whole(p),))
    count, rows, *columns = p.shape
    turned = bool(columns)
    return Stored(
        p.name,
        (count, *columns, rows) if turned else p.shape,
        tuple(Part(p.name, e, 0, rows) for e in range(count)),
        transposed=turned,
        stacked=True,
        alternating="gate_up_proj" in p.name,
    )


_GPT2_NAMES: Final = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.embed_positions.", "transformer.wpe."),
    ("model.norm.", "transformer.ln_f."),
    ("model.layers.", "transformer.h."),
    (".input_layernorm.", ".ln_1."),
    (".post_attention_layernorm.", ".ln_2."),
    (".self_attn.o_proj.", ".attn.c_proj."),
    (".mlp.up_proj.", ".mlp.c_fc."),
    (".mlp.down_proj.", ".mlp.c_proj."),
)
_QKV: Final = re.compile(r"\.self_attn\.([qkv])_proj\.")


def _gpt2(tensors: list[ParamTensor]) -> Iterator[Stored]:
    """Yields the stored tensors of one layer in GPT-2's layout."""
    for p in tensors:
        found = _QKV.search(p.name)
        if found is None:
            name = p.name
            for ours, theirs in _GPT2_NAMES:
                name = name.replace(ours, theirs)
            turned = len(p.shape) == 2 and p.role in {"attention", "mlp"}
            shape = p.shape[::-1] if turned else p.shape
            yield Stored(name, shape, (_whole(p),), turned)
        elif found[1] == "q":
            leaf = p.name.rsplit(".", 1)[1]
            trio = [t for t in tensors if _QKV.search(t.name) and t.name.endswith(leaf)]
            rows = sum(t.shape[0] for t in trio)
            name = _QKV.sub(".attn.c_attn.", p.name).replace("model.layers.", "transformer.h.")
            turned = len(p.shape) == 2
            shape = (p.shape[1], rows) if turned else (rows,)
            yield Stored(name, shape, tuple(_whole(t) for t in trio), turned)
