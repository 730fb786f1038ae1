"""How many numbers of a layer a rank holds: the vectorised twin of plan/sharding.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.sharding import tensor_split
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import ParamTensor, layer_parameters
from flopwright.spec.workload import LoraTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamCounts:
    """Numbers of one layer on one rank, by shard combination.

    Attributes:
        held: all weights, buffers that no gradient reaches included.
        dense, dense_matrix: trainable weights outside the experts, and those of them that
            Muon orthogonalises.
        expert: trainable weights of the local experts (all of them matrices).
    """

    held: Array
    dense: Array
    dense_matrix: Array
    expert: Array

    def take(self, index: NDArray[np.int64]) -> ParamCounts:
        """Returns the numbers of some columns of the last axis."""
        return ParamCounts(
            held=self.held[..., index],
            dense=self.dense[..., index],
            dense_matrix=self.dense_matrix[..., index],
            expert=self.expert[..., index],
        )


def param_counts(spec: ModelSpec, layer: int, tp: Array, ep: Array) -> ParamCounts:
    """Returns what one rank holds of a layer; tp and ep have one entry a combination.

    Args:
        ep: ranks that the experts are cut over: expert-parallel times expert-tensor-parallel.
    """
    zero = np.zeros(len(tp))
    sums = {name: zero.copy() for name in ("held", "dense", "dense_matrix", "expert")}
    for param in layer_parameters(spec, layer):
        local = np.ceil(param.numel / _split(param, tp, ep))
        sums["held"] += local
        if not param.trainable:
            continue
        if param.role == "expert":
            sums["expert"] += local
        else:
            sums["dense"] += local
            if param.is_matrix:
                sums["dense_matrix"] += local
    return ParamCounts(**sums)


def adapter_counts(
    spec: ModelSpec, layer: int, tp: Array, ep: Array, rank: int, *, targets: LoraTargets = "all"
) -> ParamCounts:
    """Returns the numbers of LoRA adapters (arXiv 2106.09685) that one rank holds of a layer.

    A matrix [n, k] has one of [rank, k] and one of [n, rank]. The side that its matrix is not
    cut along is whole on every rank of the group, as in Megatron's adapters.

    Args:
        targets: which matrices have one (Workload.lora_targets).
    """
    dense, expert = np.zeros(len(tp)), np.zeros(len(tp))
    for param in layer_parameters(spec, layer):
        wanted = targets == "all" or param.role == "attention"
        if targets == "qkv" and param.name.endswith("o_proj.weight"):
            continue
        if not wanted or not param.is_matrix or param.role == "router":
            continue
        if ".indexer." in param.name:
            continue
        if param.role == "expert":
            experts, n, k = param.shape
            expert += rank * (n + k) * np.ceil(experts / ep)
            continue
        n, k = param.shape
        split = _split(param, tp, ep)
        cut_rows = not param.name.endswith(("o_proj.weight", "down_proj.weight"))
        dense += rank * (np.ceil(n / split) + k if cut_rows else n + np.ceil(k / split))
    return ParamCounts(held=dense + expert, dense=dense, dense_matrix=dense, expert=expert)


def split_axis(param: ParamTensor) -> str:
    """Returns what cuts a tensor inside a stage, by plan/sharding.py: "tp", "ep" or "whole"."""
    plan = ParallelPlan(tp=2, ep=3)
    return {2: "tp", 3: "ep", 1: "whole"}[tensor_split(param, plan)]


def _split(param: ParamTensor, tp: Array, ep: Array) -> Array:
    return {"tp": tp, "ep": ep, "whole": np.ones(len(tp))}[split_axis(param)]
