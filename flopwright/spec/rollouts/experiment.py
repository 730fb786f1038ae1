"""What a published RL measurement was taken on, in the product's own records.

One experiment is one configuration that was run: an RL loop, a synchronisation of weights,
batches of given lengths on one engine, a queue of samples before a trainer, or an engine
alone (engine_experiment.py).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from flopwright.spec.base import Spec
from flopwright.spec.model import ModelSpec
from flopwright.spec.rollouts.engine import EngineModel, Speculation
from flopwright.spec.rollouts.engine_experiment import EngineExperiment
from flopwright.spec.rollouts.engine_served import (
    CacheType,
    EngineShape,
    EngineSoftware,
    FormatName,
    ServedModel,
)
from flopwright.spec.rollouts.layout import Batch, Colocated, Layout, Routing, UpdatePhase
from flopwright.spec.rollouts.lengths import Count, PhaseSeconds, PositiveTokens
from flopwright.spec.rollouts.weight_sync import WeightSyncPlan
from flopwright.units import BytesPerS


class NodeCluster(Spec):
    """A cluster by the type of its nodes (simulator/hardware/nodes).

    Attributes:
        gpus_per_node, network: where they differ from the type's; `network` is per GPU.
        storage: rate of the shared file system for one reader.
    """

    node_type: str = Field(min_length=1)
    gpus: Count
    gpus_per_node: PositiveInt | None = None
    network_bytes_per_s: BytesPerS | None = Field(default=None, alias="network")
    storage_bytes_per_s: BytesPerS | None = Field(default=None, alias="storage")


class EngineSetup(Spec):
    """The engines of an experiment: a model on GPUs under some software, or numbers.

    Attributes:
        served: what is served, where it is not the experiment's model in `release`.
        release: format of its weights; kv_dtype: of its cache.
        software: an engine by name (simulator/hardware/engines) or in place; memory_fraction,
            max_running, step_host: where its setting was another one.
        graphs: whether decode steps are captured; without, a step takes at least
            `least_step_s`: the host launches every kernel, whatever the batch.
        numbers: an engine that is given by its numbers; the rest is then not used.
    """

    served: ServedModel | None = None
    shape: EngineShape = EngineShape()
    software: str | EngineSoftware = "vllm"
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    max_running: PositiveInt | None = None
    step_host_s: PhaseSeconds | None = Field(default=None, alias="step_host")
    release: FormatName = "bf16"
    kv_dtype: CacheType = "bf16"
    graphs: bool = True
    least_step_s: PhaseSeconds = Field(default=0.0, alias="least_step")
    speculation: Speculation | None = None
    numbers: EngineModel | None = None


class Rollout(Spec):
    """Generation: engines on `gpus` GPUs, in instances of the engine's shape.

    Attributes:
        routing and what belongs to it: see spec.rollouts.layout.Fleet.
    """

    gpus: Count
    engine: EngineSetup = EngineSetup()
    routing: Routing = "least_loaded"
    long_share: float = Field(default=0.2, gt=0, lt=1)
    long_instances: Count | None = None
    capture: float = Field(default=1.0, ge=0, le=1)
    chunk_tokens: PositiveTokens = 8192
    wake_s: PhaseSeconds = Field(default=0.0, alias="wake")


class LoopExperiment(Spec):
    """One RL loop.

    Attributes:
        model: a catalog name or a model in place; the one that is trained and served.
        update: None where only generation was measured.
        sync: of the weights after each step; None: not counted.
        sync_in: where its time is counted: a phase of its own, or in the generation of
            co-located engines, which wake up with the new weights.
        steps: training steps behind "train_hours".
        driver_s: seconds of a step that belong to no phase (validation, reward, dumps).
    """

    kind: Literal["loop"] = "loop"
    model: ModelSpec
    cluster: NodeCluster
    batch: Batch
    rollout: Rollout
    update: UpdatePhase | None = None
    layout: Layout = Field(default=Colocated(), discriminator="kind")
    sync: WeightSyncPlan | None = None
    sync_in: Literal["step", "generation"] = "step"
    steps: PositiveInt | None = None
    driver_s: PhaseSeconds = Field(default=0.0, alias="driver")
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _woken_with_weights(self) -> Self:
        if self.sync_in == "generation" and not isinstance(self.layout, Colocated):
            raise ValueError("sync_in: generation belongs to the layout colocated")
        return self


class SyncExperiment(Spec):
    """One synchronisation of weights."""

    kind: Literal["weight_sync"] = "weight_sync"
    cluster: NodeCluster
    sync: WeightSyncPlan


class RankBatch(Spec):
    """What one rank generated: responses, their tokens together, the longest of them."""

    responses: Count
    tokens: PositiveTokens
    longest: PositiveTokens


class RanksExperiment(Spec):
    """Batches of known totals on engines that are alike, each alone."""

    kind: Literal["rank_batches"] = "rank_batches"
    model: ModelSpec
    cluster: NodeCluster
    engine: EngineSetup = EngineSetup()
    prompt_tokens: PositiveTokens
    ranks: tuple[RankBatch, ...] = Field(min_length=1)


class QueueExperiment(Spec):
    """Samples generated side by side, queued, and trained in batches (rollouts in flight).

    Attributes:
        concurrent: samples generated at once (C); batch: samples an update consumes (B).
        queue: batches the queue holds (q).
        utilization: rate at which samples are made over that at which they are trained (rho).
        tail: mean time of a prompt's slowest sample over that of a sample (M_tail).
    """

    kind: Literal["async_queue"] = "async_queue"
    concurrent: Count
    batch: Count
    queue: PositiveFloat
    utilization: PositiveFloat
    tail: float = Field(ge=1)


Experiment = Annotated[
    LoopExperiment | SyncExperiment | RanksExperiment | QueueExperiment | EngineExperiment,
    Field(discriminator="kind"),
]
