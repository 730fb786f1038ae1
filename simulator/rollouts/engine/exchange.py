"""Seconds in which tokens of one layer go to the experts of other GPUs and come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from flopwright.ops import Array, Collective
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.collectives.expert_exchange import ExpertCall, node_limit_of
from flopwright.simulator.collectives.times import collective_seconds
from flopwright.simulator.rollouts.engine.rows import Load
from flopwright.spec.model import Moe
from flopwright.spec.rollouts.engine_served import ServedLayers

if TYPE_CHECKING:
    from flopwright.simulator.rollouts.engine.price import Served

FORMULAS: Final = Calibration(id="formulas", created="", source="link curves")
# Bytes of a value on its way to the experts, by the format of their weights.
_NARROW: Final = {"fp8": 1.0, "block_fp8": 1.0, "nvfp4": 0.5625}
# Engines gather what one scale a tensor or a block of 16 quantised; blocks of 128 stay bf16.
_GATHERED: Final = {"fp8": 1.0, "nvfp4": 0.5625}


def exchange_seconds(on: Served, group: ServedLayers, loads: Load) -> Array:
    """Returns the seconds of dispatch and combine of one layer; 0 where experts are not dealt.

    Without data-parallel attention every GPU has every token: the all-reduce behind the
    experts puts the sums together.
    """
    if group.moe is None or on.shape.dp == 1:
        return np.zeros(loads.size)
    width = group.latent_size or on.model.hidden_size
    form = on.model.format_of("expert").name
    if on.software.exchange == "gather_scatter":
        return _gather_scatter(on, loads.rows * width, _GATHERED.get(form, 2.0))
    values = loads.rows * group.moe.top_k * width
    narrow = values * _NARROW.get(form, 2.0)
    decoding = low_latency_s(on, narrow) + low_latency_s(on, values * 2.0)
    normal = _normal(on, group.moe, "dispatch", narrow) + _normal(
        on, group.moe, "combine", values * 2.0
    )
    return np.asarray(np.where(loads.prompt_tokens > 0, normal, decoding))


def _gather_scatter(on: Served, values: Array, width: float) -> Array:
    """All tokens gathered on every GPU in their narrow format, sums scattered back in bf16."""
    group = on.group(on.shape.dp, on.shape.tp)
    everywhere = values * on.shape.dp
    there = collective_seconds(
        Collective.ALL_GATHER, everywhere * width, group, on.cluster, FORMULAS
    )
    back = collective_seconds(
        Collective.REDUCE_SCATTER, everywhere * 2.0, group, on.cluster, FORMULAS
    )
    return np.asarray(there.seconds + back.seconds)


def _normal(on: Served, moe: Moe, call: ExpertCall, nbytes: Array) -> Array:
    """Seconds of the exchange of many tokens: one copy to a node, then one to each GPU of it."""
    ranks = on.shape.gpus
    group = on.group(ranks)
    limit = (
        node_limit_of(moe.num_groups, moe.top_k_groups, group.nodes)
        if moe.num_groups > 1
        else None
    )
    leaving = nbytes * (ranks - 1) / ranks
    return collective_seconds(
        Collective.ALL_TO_ALL, leaving, group, on.cluster, FORMULAS, copies=moe.top_k, call=call,
        node_limit=limit,
    ).seconds  # fmt: skip


def low_latency_s(on: Served, nbytes: Array) -> Array:
    """Returns the seconds of sending nbytes of a GPU in equal parts to all, itself included."""
    ranks, curve = on.shape.gpus, on.curves.exchange
    group = on.group(ranks)
    local = float(group.local)
    near, far = nbytes * (local - 1) / ranks, nbytes * (ranks - local) / ranks
    if curve is None:
        leaving = nbytes * (ranks - 1) / ranks
        return collective_seconds(
            Collective.ALL_TO_ALL, leaving, group, on.cluster, FORMULAS
        ).seconds
    rate = on.cluster.node.link.bytes_per_s * curve.near_share
    inside = curve.near_base_s + near / rate
    if not bool(group.spans):
        return np.asarray(inside)
    network = on.cluster.network
    assert network is not None
    across = curve.far_base_s + far / (network.bytes_per_s * curve.far_share)
    return np.asarray(np.maximum(inside, across))
