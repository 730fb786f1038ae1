"""An RL loop to be planned: the round's workload, the GPUs, the model, and what may be tried.

The round itself (`rollout`) is complete in numbers and can be simulated alone. What stands
beside it says where those numbers come from on given GPUs, so that they can be had for other
instances, other shares of the GPUs and other places for caches and training states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from flopwright.spec.base import Spec
from flopwright.spec.cluster import MAX_GPUS, ClusterSpec
from flopwright.spec.load import (
    CLUSTER_CATALOG,
    GPU_CATALOG,
    MODEL_CATALOG,
    SCENARIO_CATALOG,
    _inline,
    _open,
    _reference,
    catalog_names,
)
from flopwright.spec.model import ModelSpec
from flopwright.spec.phases import MAX_SEQ_LEN
from flopwright.spec.rollout import ROLLOUT_CATALOG, RolloutScenario, with_stop_fraction
from flopwright.spec.rollouts.engine_served import (
    CacheType,
    EngineSoftware,
    FormatName,
    ServedModel,
    served_model,
)
from flopwright.spec.scenario import SearchSpace
from flopwright.spec.validate import validate
from flopwright.spec.workload import Optimizer, Precision
from flopwright.spec.yaml_lines import Document, parse_yaml
from flopwright.units import Bytes, Seconds

SERVED_CATALOG: Final = SCENARIO_CATALOG / "serving" / "models"
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
        software: the engine's habits; None: those of a current vLLM.
    """

    model: ModelSpec | None = None
    served: ServedModel | None = None
    weights: FormatName = "bf16"
    kv_dtype: CacheType = "bf16"
    software: EngineSoftware | None = None

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


class LoopRound(RolloutScenario):
    """The round of a loop; its engine may be left out where `serve` says what generates."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.decode is None and self.engine is None:
            return self
        parent: Any = super()
        checked: Self = parent._possible()
        return checked


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


class LoopSpace(Spec):
    """Bounds of the search; an empty list means what planner/rollouts/space.py takes for all.

    Attributes:
        generation_share: share of the GPUs that generate, where phases have their own.
        slots: attempts an instance decodes at once; 0: what its cache holds.
        stop_fraction: lambdas; staleness_bound: versions, of an asynchronous loop.
        host_pool: host memory of a node for caches; 0: none.
        states: where training states lie while GPUs generate.
        throttle: whether admission is throttled by the use of the cache.
    """

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


class LoopScenario(Spec):
    """Everything an RL loop is planned for.

    Attributes:
        rollout: the round; its engine, instances, phases and lambda are where the search
            starts, and what it keeps where nothing here says how to get others.
        cluster, gpus: what there is; gpus: None takes all of the cluster. cluster: None takes
            the GPUs of `rollout`, of which no more is known.
        serve: what generates; None: the engine is that of `rollout`, its shape is not searched.
        train: the update; None: as `rollout.update` says, whichever GPUs train.
        objective: completed attempts a second, or least money for one.
        sources: where a number comes from; "assumed: ..." where nothing was published.
    """

    kind: Literal["rl_loop"] = "rl_loop"
    name: str = Field(min_length=1)
    description: str = ""
    rollout: LoopRound
    cluster: ClusterSpec | None = None
    gpus: Ranks | None = None
    serve: Serving | None = None
    train: Training | None = None
    hosts: Hosts = Hosts()
    search: LoopSpace = LoopSpace()
    objective: Objective = "throughput"
    sources: dict[str, str] = Field(default_factory=dict)

    @property
    def num_gpus(self) -> int:
        """GPUs of the loop."""
        if self.gpus is not None:
            return self.gpus
        return self.rollout.num_gpus if self.cluster is None else self.cluster.num_gpus

    @property
    def used_cluster(self) -> ClusterSpec | None:
        """The nodes that the loop's GPUs are in."""
        if self.cluster is None:
            return None
        return nodes_of(self.cluster, self.num_gpus)

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.serve is not None and self.cluster is None:
            raise ValueError("serve needs a cluster: its GPUs and links give the times")
        if self.train is not None and self.train.model is not None and self.cluster is None:
            raise ValueError("train.model needs a cluster")
        if self.serve is None and self.rollout.decode is None and self.rollout.engine is None:
            raise ValueError("give serve, or rollout.decode, or rollout.engine")
        if self.cluster is not None and self.num_gpus > self.cluster.num_gpus:
            raise ValueError(
                f"gpus ({self.num_gpus}) must not exceed the cluster's {self.cluster.num_gpus}"
            )
        if self.cluster is not None and self.num_gpus > self.cluster.node.gpus:
            each = self.cluster.node.gpus
            if self.num_gpus % each:
                raise ValueError(f"gpus ({self.num_gpus}) must be whole nodes of {each}")
        return self


def nodes_of(cluster: ClusterSpec, gpus: int) -> ClusterSpec:
    """Returns the cluster cut to the nodes that hold so many GPUs."""
    nodes = -(-gpus // cluster.node.gpus)
    update: dict[str, object] = {"num_nodes": nodes}
    if nodes == 1 and gpus < cluster.node.gpus:
        node = cluster.node
        each = gpus / node.gpus
        update["node"] = node.model_copy(
            update={"gpus": gpus, "host_bytes": int(node.host_bytes * each)}
        )
    return cluster.model_copy(update=update)


def loop_of(rollout: RolloutScenario) -> LoopScenario:
    """Returns a round as a loop of which no more is known: only its policy can be searched."""
    return LoopScenario(
        name=rollout.name,
        description=rollout.description,
        rollout=LoopRound(
            **{name: getattr(rollout, name) for name in RolloutScenario.model_fields}
        ),
        search=LoopSpace(layout=("colocated",)),
    )


def load_loop_scenario(name_or_path: str | Path) -> LoopScenario:
    """Returns a loop from a file or from those that ship; a plain round becomes a loop.

    Raises:
        InputError: every violation of the file, each with its line and nearest fix.
    """
    return loop_from(_open(name_or_path, ROLLOUT_CATALOG, "rollout scenario"))


def loop_scenario_from_text(text: str, file: str = "loop.yaml") -> LoopScenario:
    """Returns a loop from YAML text; raises as `load_loop_scenario` does."""
    return loop_from(parse_yaml(text, file))


def at_stop_fraction(loop: LoopScenario, stop_fraction: float) -> LoopScenario:
    """Returns the loop with one lambda, which is not searched.

    Raises:
        InputError: lambda outside [0.01, 1].
    """
    rollout = with_stop_fraction(loop.rollout, stop_fraction)
    search = loop.search.model_copy(update={"stop_fraction": (stop_fraction,)})
    return loop.model_copy(update={"rollout": rollout, "search": search})


def is_loop(name_or_path: str | Path) -> bool:
    """Returns whether the file describes a loop to be planned, not a round alone."""
    return _is_loop(_open(name_or_path, ROLLOUT_CATALOG, "rollout scenario"))


def round_names() -> list[str]:
    """Returns the names of the shipped rounds that are complete in numbers."""
    return [n for n in catalog_names(ROLLOUT_CATALOG) if not is_loop(n)]


def _is_loop(document: Document) -> bool:
    data = document.data
    return isinstance(data, dict) and (data.get("kind") == "rl_loop" or "rollout" in data)


def loop_from(document: Document) -> LoopScenario:
    """Returns the document as a loop, its references to the catalogs resolved."""
    if not _is_loop(document):
        return loop_of(validate(RolloutScenario, document))
    _inline(document, ("cluster",), CLUSTER_CATALOG, "cluster")
    _inline(document, ("cluster", "node", "gpu"), GPU_CATALOG, "GPU")
    _inline(document, ("serve", "model"), MODEL_CATALOG, "model")
    _inline_served(document)
    _inline(document, ("train", "model"), MODEL_CATALOG, "model")
    return validate(LoopScenario, document)


def _inline_served(document: Document) -> None:
    """Replaces the name of a served model by what its file says, in place."""
    serve = document.data.get("serve")
    if isinstance(serve, dict) and isinstance(serve.get("served"), str):
        key = ("serve", "served")
        found = _reference(document, key, serve["served"], SERVED_CATALOG, "served model")
        validate(ServedModel, found)
        serve["served"] = found.data
