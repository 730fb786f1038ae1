"""An RL loop to be planned: the round's workload, the GPUs, the model, and what may be tried.

The round itself (`rollout`) is complete in numbers and can be simulated alone. What stands
beside it says where those numbers come from on given GPUs, so that they can be had for other
instances, other shares of the GPUs and other places for caches and training states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from flopwright.spec.base import Grown
from flopwright.spec.changed import changed_document, parse_changes
from flopwright.spec.cluster import ClusterSpec
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
from flopwright.spec.loop_parts import Elastic as Elastic
from flopwright.spec.loop_parts import Hosts as Hosts
from flopwright.spec.loop_parts import LayoutKind as LayoutKind
from flopwright.spec.loop_parts import LoopSpace as LoopSpace
from flopwright.spec.loop_parts import Objective as Objective
from flopwright.spec.loop_parts import Place as Place
from flopwright.spec.loop_parts import Ranks, Serving, Training
from flopwright.spec.rollout import (
    ROLLOUT_CATALOG,
    RolloutGoals,
    RolloutScenario,
    with_stop_fraction,
)
from flopwright.spec.rollouts.engine_served import ServedModel
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import Document, parse_yaml

SERVED_CATALOG: Final = SCENARIO_CATALOG / "serving" / "models"


class LoopRound(RolloutScenario):
    """The round of a loop; its engine may be left out where `serve` says what generates."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.decode is None and self.engine is None:
            return self
        parent: Any = super()
        checked: Self = parent._possible()
        return checked


class LoopScenario(Grown):
    """Everything an RL loop is planned for.

    Attributes:
        rollout: the round; its engine, instances, phases and lambda are where the search
            starts, and what it keeps where nothing here says how to get others.
        cluster, gpus: what there is; gpus: None takes all of the cluster. cluster: None takes
            the GPUs of `rollout`, of which no more is known.
        serve: what generates; None: the engine is that of `rollout`, its shape is not searched.
        train: the update; None: as `rollout.update` says, whichever GPUs train.
        elastic: how GPUs are lent where the search does that.
        objective: completed attempts a second, or least money for one.
        sources: where a number comes from; "assumed: ..." where nothing was published.
    """

    later_fields: ClassVar[tuple[str, ...]] = ("elastic",)

    kind: Literal["rl_loop"] = "rl_loop"
    name: str = Field(min_length=1)
    description: str = ""
    rollout: LoopRound
    cluster: ClusterSpec | None = None
    gpus: Ranks | None = None
    serve: Serving | None = None
    train: Training | None = None
    hosts: Hosts = Hosts()
    elastic: Elastic = Elastic()
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


def open_scenario(name_or_path: str | Path, changes: Sequence[str] = ()) -> Document:
    """Returns a round or a loop as it stands in its file, with `field=value` changes made.

    Raises:
        InputError: an unknown name, an unreadable file, or what is wrong with the changes.
    """
    document = _open(name_or_path, ROLLOUT_CATALOG, "rollout scenario")
    return changed_document(document, parse_changes(changes)) if changes else document


def load_loop_scenario(name_or_path: str | Path) -> LoopScenario:
    """Returns a loop from a file or from those that ship; a plain round becomes a loop.

    Raises:
        InputError: every violation of the file, each with its line and nearest fix.
    """
    return loop_from(open_scenario(name_or_path))


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


def within_staleness(loop: LoopScenario, max_mean_staleness: float) -> LoopScenario:
    """Returns the loop with another bound on the mean policy versions behind."""
    goals = RolloutGoals(max_mean_staleness=max_mean_staleness)
    rollout = loop.rollout.model_copy(update={"goals": goals})
    return loop.model_copy(update={"rollout": rollout})


def is_loop(name_or_path: str | Path) -> bool:
    """Returns whether the file describes a loop to be planned, not a round alone."""
    return is_loop_document(open_scenario(name_or_path))


def round_names() -> list[str]:
    """Returns the names of the shipped rounds that are complete in numbers."""
    return [n for n in catalog_names(ROLLOUT_CATALOG) if not is_loop(n)]


def is_loop_document(document: Document) -> bool:
    """Returns whether a document describes a loop to be planned."""
    data = document.data
    return isinstance(data, dict) and (data.get("kind") == "rl_loop" or "rollout" in data)


def loop_from(document: Document) -> LoopScenario:
    """Returns the document as a loop, its references to the catalogs resolved."""
    if not is_loop_document(document):
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
