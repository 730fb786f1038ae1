"""Which rows of a layer a recompute policy runs again, and which tensors it drops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.models.core_attention import TAG_CORE
from flopwright.models.mlp.cost import TAG as TAG_ACTIVATION
from flopwright.ops import BlockCost, Phase
from flopwright.plan.parallel import SELECTIVE_TAGS, RecomputeName
from flopwright.simulator.training.candidates import RECOMPUTES, Candidates, Ints
from flopwright.simulator.training.layers import is_transformer_layer

Bools = NDArray[np.bool_]
_MLP, _EXPERTS, _SHARED = "mlp.", "mlp.experts.", "mlp.shared_experts."
_CORE = "self_attn.attention"
# What repeats a group's results beside its operators: what travels between them and those who
# keep them. Latents are kept as gathered, the experts' results where their tokens are.
_TRAVELS: Final = {
    "norm": ("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
    "mla_up": ("self_attn.q_up",),
    "core_attn": (
        "self_attn.kv_context",
        "self_attn.conv_context",
        "self_attn.state_context",
        "self_attn.heads",
        "self_attn.heads_out",
    ),
    "moe_down": ("mlp.combine", "mlp.combine.regroup", "mlp.experts.results"),
}
# Sums that are no part of a block that is recomputed as a whole.
_OUTSIDE = ("mlp.residual", "mlp.input_grad_sum")


@dataclass(frozen=True, slots=True)
class Policy:
    """A recompute policy; `tags` are the groups that "selective" drops."""

    name: RecomputeName
    tags: frozenset[str] = frozenset()

    def of(self, layer_kind: str) -> Policy:
        """Returns the policy as it applies to a kind of layer: only layers run again whole."""
        whole = self.name == "full" and not is_transformer_layer(layer_kind)
        return Policy("none") if whole else self


# Without lists of their own, plans have these: in the order of RECOMPUTES.
STANDARD: Final = (Policy("none"), Policy("selective", SELECTIVE_TAGS), Policy("full"))


def policies_of(candidates: Candidates) -> tuple[Policy, ...]:
    """Returns the standard policies and behind them one for each list of tags."""
    lists = (Policy("selective", frozenset(tags)) for tags in candidates.tag_lists)
    return (*STANDARD, *lists)


def policy_index(candidates: Candidates) -> Ints:
    """Returns which of `policies_of` each candidate has."""
    c = candidates
    own = (c.recompute == RECOMPUTES.index("selective")) & (c.recompute_tags >= 0)
    return np.where(own, len(STANDARD) + c.recompute_tags, c.recompute)


def in_group(group: str, tag: str, name: str, layer_kind: str) -> bool:
    """Returns whether a row or a kept tensor belongs to a group of RECOMPUTE_TAGS."""
    is_moe = layer_kind.startswith("moe")
    inside = name.startswith(_MLP) and not name.startswith(_OUTSIDE)
    if group == "core_attn":
        kept = tag == TAG_CORE or name.endswith("attention.lse") or name in _TRAVELS[group]
        return kept or (name.startswith(_CORE) and not name.endswith(".out"))
    if group in {"act", "moe_act"}:
        return tag == TAG_ACTIVATION and name.startswith(_EXPERTS) == (group == "moe_act")
    if group == "shared_experts":
        return name.startswith(_SHARED)
    if group in {"mlp", "moe"}:
        return inside and is_moe == (group == "moe")
    return tag == group or name in _TRAVELS.get(group, ())


def run_again(cost: BlockCost, policy: Policy, layer_kind: str) -> Bools:
    """Returns which operator rows run again in the backward pass."""
    forward = np.asarray(cost.ops.phase == Phase.FORWARD)
    if policy.name == "none":
        return np.zeros_like(forward)
    if policy.name == "full":
        return forward
    names = zip(cost.ops.tag, cost.ops.name, strict=True)
    return forward & _grouped(names, policy, layer_kind)


def exchanged_again(cost: BlockCost, policy: Policy, layer_kind: str) -> Bools:
    """Returns which collectives repeat: those of a block that runs again as a whole."""
    forward = np.array([p == Phase.FORWARD for p in cost.comms.phase], bool)
    if policy.name == "none":
        return np.zeros_like(forward)
    if policy.name == "full":
        return forward
    names = (("", name) for name in cost.comms.name)
    return forward & _grouped(names, policy, layer_kind)


def kept(cost: BlockCost, policy: Policy, layer_kind: str) -> Bools:
    """Returns which tensors stay from the forward to the backward; "full" keeps none of them."""
    lives = cost.lives
    activations = np.array([c == "activation" for c in lives.cls], bool)
    if policy.name == "full":
        return np.zeros_like(activations)
    if policy.name == "none":
        return activations
    names = zip(lives.tag, lives.name, strict=True)
    return activations & ~_grouped(names, policy, layer_kind)


def _grouped(names: Iterable[tuple[str, str]], policy: Policy, layer_kind: str) -> Bools:
    return np.array(
        [any(in_group(g, tag, name, layer_kind) for g in policy.tags) for tag, name in names],
        bool,
    )
