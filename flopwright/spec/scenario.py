"""A scenario: a model on a cluster with a workload, and what the planner may try."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from flopwright.plan.schedules.placement import ScheduleName
from flopwright.spec.base import Grown
from flopwright.spec.cluster import MAX_GPUS, ClusterSpec
from flopwright.spec.model import MAX_LAYERS, ModelSpec
from flopwright.spec.workload import MAX_BATCH, GemmRecipe, Workload

Ranks = Annotated[int, Field(ge=1, le=MAX_GPUS)]
Objective = Literal["time", "cost", "energy", "headroom", "gpus"]


class SearchSpace(Grown):
    """Bounds of the search; an empty list means every legal value.

    What "every" means where it is not plain (planner/space_axes.py): schedules that a GPU
    cluster can run, cp that leaves a rank a few thousand tokens, etp 1 or tp.

    Attributes:
        dp_replicate: replicas of a shard group (hybrid sharding), tried under ZeRO.
        recompute_tags: lists that "selective" is tried with beside its own; None: a few that
            published runs use.
        recompute_layers: depths that "full" is tried with beside all layers; None: half of
            a chunk's layers.
        fp8_activations, the offloads, sequence_parallel, fused_loss: values tried.
        gemm: formats of matrix products; empty: the workload's own.
    """

    later_fields = (
        "cp",
        "etp",
        "dp_replicate",
        "schedule",
        "context_parallel",
        "sequence_parallel",
        "recompute_tags",
        "recompute_layers",
        "fp8_activations",
        "activation_offload",
        "optimizer_offload",
        "gradient_offload",
        "parameter_offload",
        "fused_loss",
        "gemm",
    )

    tp: tuple[Ranks, ...] = ()
    pp: tuple[Ranks, ...] = ()
    ep: tuple[Ranks, ...] = ()
    vpp: tuple[Ranks, ...] = ()
    zero_stage: tuple[Literal[0, 1, 2, 3], ...] = (0, 1)
    micro_batch_size: tuple[Annotated[int, Field(ge=1, le=MAX_BATCH)], ...] = ()
    recompute: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    memory_headroom: float = Field(default=0.05, ge=0, lt=1)
    cp: tuple[Ranks, ...] = ()
    etp: tuple[Ranks, ...] = ()
    dp_replicate: tuple[Ranks, ...] = ()
    schedule: tuple[ScheduleName, ...] = ()
    context_parallel: tuple[Literal["ring", "all_gather", "ulysses"], ...] = ()
    sequence_parallel: tuple[bool, ...] = (True,)
    recompute_tags: tuple[tuple[str, ...], ...] | None = None
    recompute_layers: tuple[Annotated[int, Field(ge=1, le=MAX_LAYERS)], ...] | None = None
    fp8_activations: tuple[bool, ...] = ()
    activation_offload: tuple[bool, ...] = ()
    optimizer_offload: tuple[bool, ...] = ()
    gradient_offload: tuple[bool, ...] = ()
    parameter_offload: tuple[bool, ...] = ()
    fused_loss: tuple[bool, ...] = ()
    gemm: tuple[GemmRecipe, ...] = ()


class Scenario(Grown):
    """Everything a plan is searched for.

    Attributes:
        objective: what is made least: a step's seconds ("time"), GPU-seconds ("cost") or
            joules ("energy"), the fullest GPU's memory ("headroom"), GPUs ("gpus"; then
            seconds).
        stack: the software that runs it, by name (simulator/accuracy/named_stacks.py); ""
            is the default.
        sweep: values by dotted field ("workload.seq_len"): `flopwright sweep` plans the
            scenario once for every combination of them.
    """

    later_fields = ("sweep", "stack")

    name: str = Field(min_length=1)
    description: str = ""
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    search: SearchSpace = SearchSpace()
    objective: Objective = "time"
    stack: str = ""
    sweep: dict[str, tuple[JsonValue, ...]] = Field(default={})
