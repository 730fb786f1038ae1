"""A scenario: a model on a cluster with a workload, and what the planner may try."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from flopwright.spec.base import Grown, Spec
from flopwright.spec.cluster import MAX_GPUS, ClusterSpec
from flopwright.spec.model import ModelSpec
from flopwright.spec.workload import MAX_BATCH, Workload

Ranks = Annotated[int, Field(ge=1, le=MAX_GPUS)]


class SearchSpace(Spec):
    """Bounds of the search; an empty list means every legal value."""

    tp: tuple[Ranks, ...] = ()
    pp: tuple[Ranks, ...] = ()
    ep: tuple[Ranks, ...] = ()
    vpp: tuple[Ranks, ...] = ()
    zero_stage: tuple[Literal[0, 1, 2, 3], ...] = (0, 1)
    micro_batch_size: tuple[Annotated[int, Field(ge=1, le=MAX_BATCH)], ...] = ()
    recompute: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    memory_headroom: float = Field(default=0.05, ge=0, lt=1)


class Scenario(Grown):
    """Everything a plan is searched for.

    Attributes:
        sweep: values by dotted field ("workload.seq_len"): `flopwright sweep` plans the
            scenario once for every combination of them.
    """

    later_fields = ("sweep",)

    name: str = Field(min_length=1)
    description: str = ""
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    search: SearchSpace = SearchSpace()
    objective: Literal["time", "cost"] = "time"
    sweep: dict[str, tuple[JsonValue, ...]] = Field(default={})
