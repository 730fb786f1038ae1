"""What stands beside the round of an RL loop: what generates, what trains, hosts, axes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from flopwright.spec.base import Grown, Spec
from flopwright.spec.cluster import MAX_GPUS
from flopwright.spec.model import ModelSpec
from flopwright.spec.phases import MAX_SEQ_LEN
from flopwright.spec.rollouts.engine_served import (
    CacheType,
    EngineSoftware,
    FormatName,
    ServedModel,
    served_model,
)
from flopwright.spec.rollouts.lengths import PhaseSeconds
from flopwright.spec.scenario import SearchSpace
from flopwright.spec.workload import Optimizer, Precision
from flopwright.units import Bytes, Seconds

LayoutKind = Literal["colocated", "disaggregated", "one_step_off", "async"]
Place = Literal["hbm", "dram", "nvme"]
Objective = Literal["throughput", "cost"]
Passes = tuple[Literal["old", "reference", "teacher"], ...]
Ranks = Annotated[int, Field(ge=1, le=MAX_GPUS)]
Share = Annotated[float, Field(gt=0, lt=1)]
Fraction = Annotated[float, Field(ge=0.01, le=1)]


# An update is re-planned for every share of the GPUs, so less is tried than for a long run.
UPDATE_SEARCH: Final = SearchSpace(
    zero_stage=(1,),
    vpp=(1,),
    schedule=("1f1b",),
    recompute=("selective", "full"),
    context_parallel=("all_gather",),
    fp8_activations=(False,),
)


class Serving(Spec):
    """What generates, where its times are had from operators and links of the cluster.

    Attributes:
        model: of the catalog, in the release format `weights`; or
        served: a model by its layers.
        software: the engine's habits, by name (simulator/hardware/engines) or in place; None:
            those of a current vLLM.
    """

    model: ModelSpec | None = None
    served: ServedModel | None = None
    weights: FormatName = "bf16"
    kv_dtype: CacheType = "bf16"
    software: str | EngineSoftware | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.model is None) == (self.served is None):
            raise ValueError("give one of model (of the catalog) and served (by layers)")
        return self

    def as_served(self) -> ServedModel:
        """Returns the model as an engine holds it."""
        if self.served is not None:
            return self.served
        assert self.model is not None
        return served_model(self.model, self.weights, self.kv_dtype)


class Training(Spec):
    """The update phase.

    Attributes:
        model: what is trained; None: the time a token takes is stated instead.
        seq_len: tokens of a packed sequence of the update.
        mini_batches: optimizer steps an iteration.
        log_prob: forward passes over all tokens before the update: of the old policy, of a
            reference model, of a teacher whose weights are streamed from the host.
        ptx_share: pre-training tokens beside the trained ones, as a share of these.
        gpu_s_per_token: GPU-seconds of one trained token over all passes (model: None).
        fixed_s: of an update, whatever it trains on (model: None).
        state_bytes: weights, gradients and optimizer state over all GPUs (model: None).
        held_bytes: other models in the memory of all hosts together, such as teachers.
        search: what the planner may try for the split of the update.
    """

    model: ModelSpec | None = None
    seq_len: int = Field(default=32_768, ge=1, le=MAX_SEQ_LEN)
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    mini_batches: PositiveInt = 1
    log_prob: Passes = ("old",)
    ptx_share: float = Field(default=0.0, ge=0, le=10)
    stack: str = ""
    gpu_s_per_token: NonNegativeFloat | None = None
    fixed_s: Seconds = Field(default=0.0, alias="fixed")
    state_bytes: Bytes = Field(default=0, alias="state")
    held_bytes: Bytes = Field(default=0, alias="held")
    search: SearchSpace = UPDATE_SEARCH

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.model is None) == (self.gpu_s_per_token is None):
            raise ValueError("give one of model and gpu_s_per_token")
        return self


class Hosts(Spec):
    """What the hosts of the GPUs hold beside caches and states.

    Attributes:
        reserved_bytes: of a node: system, data, launchers, buffers of transfers.
        nvme_bytes: disks of a node; 0: none that may be used.
        nvme_bytes_per_s: of a node, either way.
    """

    reserved_bytes: Bytes = Field(default=64 * 2**30, alias="reserved")
    nvme_bytes: Bytes = Field(default=0, alias="nvme")
    nvme_bytes_per_s: Annotated[float, Field(gt=0)] = 6e9


class Elastic(Spec):
    """How GPUs that train become engines while they wait, and go back.

    What states and weights take on the way is computed and added.

    Attributes:
        below: they are lent where the buffer holds less than this share of an update.
        start_s: until their engines are awake; stop_s: until these are gone.
    """

    below: float = Field(default=0.5, gt=0, le=1)
    start_s: PhaseSeconds = Field(default=5.0, alias="start")
    stop_s: PhaseSeconds = Field(default=5.0, alias="stop")


class LoopSpace(Grown):
    """Bounds of the search; an empty list means what planner/rollouts/choices.py takes for all.

    Attributes:
        generation_share: share of the GPUs that generate, where phases have their own.
        slots: attempts an instance decodes at once; 0: what its cache holds.
        stop_fraction: lambdas; staleness_bound: versions, of an asynchronous loop.
        host_pool: host memory of a node for caches; 0: none.
        states: where training states lie while GPUs generate.
        throttle: whether admission is throttled by the use of the cache.
        elastic: whether the GPUs that train generate too while they wait, in an asynchronous loop.
    """

    later_fields: ClassVar[tuple[str, ...]] = ("elastic",)

    layout: tuple[LayoutKind, ...] = ()
    generation_share: tuple[Share, ...] = ()
    tp: tuple[Ranks, ...] = ()
    ep: tuple[Ranks, ...] = ()
    slots: tuple[NonNegativeInt, ...] = ()
    stop_fraction: tuple[Fraction, ...] = Field(default=(), alias="lambda")
    staleness_bound: tuple[NonNegativeInt, ...] = ()
    host_pool: tuple[Bytes, ...] = ()
    states: tuple[Place, ...] = ()
    throttle: tuple[bool, ...] = ()
    elastic: tuple[bool, ...] = ()
