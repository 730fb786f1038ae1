"""QK-Clip (MuonClip, arXiv 2507.20534, 2.1): logits bounded through the weights of q and k.

The forward passes of a step record each head's largest logit S. After the optimizer's
update a head with S > tau has its query and key weights scaled by gamma = tau / S, so that
the same batch would give it S = tau. Only what belongs to the head alone is scaled: heads
that did not exceed tau keep their bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from flopwright.errors import InputError, Violation
from flopwright.kernels.attention.documents import document_max_logit
from flopwright.kernels.attention.max_logit import max_logit
from flopwright.kernels.attention.op import attention_with_max
from flopwright.models.saving import running_again
from flopwright.models.transformer.module import Stage
from flopwright.spec.model import GqaAttention, MlaAttention

TAU: Final = 100.0
ALPHA: Final = 0.5
# A block of keys as context parallelism takes them; its last argument says whether it is causal.
_BLOCK_OP: Final = "flopwright::attention_block"
_DOCUMENTS_OP: Final = "flopwright::document_attention"
_ATTENTION_OPS: Final = frozenset({"flopwright::attention", _BLOCK_OP, _DOCUMENTS_OP})


class RecordMaxLogits:
    """Within it, the attention of stages' layers in training leaves each head's largest logit.

    A dispatch mode sees the attention ops, but only while a layer's attention runs: what else
    a stage does takes no detour.

    Attributes:
        maxima: [heads] at least fp32 by layer number, over all forward passes so far.
            In a distributed run all-reduce them (maximum) over the ranks that saw other
            tokens, before `clip_`.
    """

    def __init__(self, *stages: Stage) -> None:
        self.maxima: dict[int, Tensor] = {}
        self._layers = {int(n): layer for s in stages for n, layer in s.model.layers.items()}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> RecordMaxLogits:
        for number, layer in self._layers.items():
            attention: nn.Module = layer.self_attn  # type: ignore[assignment]
            watch = _Watch(self.maxima, number)
            self._handles += [
                attention.register_forward_pre_hook(watch.begin),
                attention.register_forward_hook(watch.end, always_call=True),
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._handles:
            self._handles.pop().remove()


class _Watch(TorchDispatchMode):
    """On between the beginning and the end of one layer's attention in training."""

    def __init__(self, maxima: dict[int, Tensor], layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._maxima, self._layer, self._on = maxima, layer, False

    def begin(self, module: nn.Module, _args: Any) -> None:
        """Begins to look at ops."""
        self._on = module.training and not running_again()  # once is enough
        if self._on:
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """Ends it."""
        if self._on:
            self._on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name not in _ATTENTION_OPS:
            return func(*args, **(kwargs or {}))
        if name == _BLOCK_OP:
            q, k, _, scale, causal = args
            found, seen = func(*args), max_logit(q, k, scale, causal=causal)
        elif name == _DOCUMENTS_OP:
            q, k, _, *rest = args
            found, seen = func(*args), document_max_logit(q, k, *rest)
        else:  # a kernel that finds the maximum on its way makes no second pass
            *found, seen = attention_with_max(*args)
        before = self._maxima.get(self._layer, seen)
        self._maxima[self._layer] = torch.maximum(before, seen)
        return tuple(found)


def row_factors(
    stage: Stage, maxima: Mapping[int, Tensor], tau: float = TAU, alpha: float = ALPHA
) -> dict[str, Tensor]:
    """Returns by parameter name the factor [rows] of each of its rows; 1 is exact.

    MLA: sqrt(gamma) on a head's position-free query and key rows, gamma on its rotary query
    rows; the rotary key belongs to all heads and stays. Multi-head attention: gamma^alpha on
    queries, gamma^(1 - alpha) on keys. Where heads share a key, gamma on the query alone.

    Args:
        maxima: largest logit of each head by layer number (`RecordMaxLogits.maxima`).
        tau: what no logit is to exceed.

    Raises:
        InputError: heads whose queries and keys are normalised, which no factor changes.
    """
    out: dict[str, Tensor] = {}
    for number, largest in maxima.items():
        gamma = torch.where(largest > tau, tau / largest, torch.ones_like(largest))
        spec = stage.spec.attention
        rows = (
            _latent_rows(spec, gamma)
            if isinstance(spec, MlaAttention)
            else _head_rows(spec, gamma, alpha)
        )
        attention = stage.model.layers[str(number)].self_attn
        for name, factor in rows.items():
            projection = getattr(attention, name)
            for leaf, _ in projection.named_parameters():
                out[f"model.layers.{number}.self_attn.{name}.{leaf}"] = factor
    return out


def _latent_rows(spec: MlaAttention, gamma: Tensor) -> dict[str, Tensor]:
    root = gamma.sqrt().unsqueeze(1)
    nope, rotary = spec.qk_nope_head_dim, spec.qk_rope_head_dim
    query = torch.cat((root.expand(-1, nope), gamma.unsqueeze(1).expand(-1, rotary)), 1)
    value = torch.ones_like(root).expand(-1, spec.v_head_dim)
    key = torch.cat((root.expand(-1, nope), value), 1)
    name = "q_proj" if spec.q_lora_rank is None else "q_b_proj"
    return {name: query.flatten(), "kv_b_proj": key.flatten()}


def _head_rows(spec: GqaAttention, gamma: Tensor, alpha: float) -> dict[str, Tensor]:
    if spec.qk_norm:
        raise InputError(
            Violation(
                field="model.attention.qk_norm",
                rule="QK-Clip cannot bound logits of normalised queries and keys",
                nearest_fix="leave QK-Clip out: the norm bounds them already",
            )
        )
    if spec.num_heads != spec.num_kv_heads:
        return {"q_proj": gamma.repeat_interleave(spec.head_dim)}
    return {
        "q_proj": (gamma**alpha).repeat_interleave(spec.head_dim),
        "k_proj": (gamma ** (1 - alpha)).repeat_interleave(spec.head_dim),
    }


@torch.no_grad()
def scale_rows_(tensor: Tensor, factor: Tensor) -> None:
    """Multiplies rows of a weight (or values of a bias) in place, rounding once."""
    wide = tensor.to(torch.promote_types(tensor.dtype, factor.dtype))
    shaped = factor.reshape(-1, *[1] * (tensor.ndim - 1))
    tensor.copy_(wide * shaped)


def clip_(
    stage: Stage, maxima: Mapping[int, Tensor], tau: float = TAU, alpha: float = ALPHA
) -> None:
    """Scales a stage's weights after the optimizer's update; see `row_factors`.

    Wider master copies are weights too: give them `scale_rows_` with the same factors.
    """
    parameters = dict(stage.named_parameters())
    for name, factor in row_factors(stage, maxima, tau, alpha).items():
        scale_rows_(parameters[name], factor)
