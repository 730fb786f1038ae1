"""The cluster and the engines that an experiment describes."""

from __future__ import annotations

from typing import Any

from flopwright.simulator.accuracy.run_of_row_cluster import as_noted
from flopwright.simulator.hardware.nodes.types import cluster_of, node_type
from flopwright.simulator.rollouts.engine.build import engine_model
from flopwright.simulator.rollouts.engine.software import engine_software
from flopwright.spec.cluster import ClusterSpec, LinkSpec
from flopwright.spec.model import ModelSpec
from flopwright.spec.rollouts.engine import EngineModel
from flopwright.spec.rollouts.engine_served import EngineSoftware, served_model
from flopwright.spec.rollouts.experiment import EngineSetup, NodeCluster


def cluster_from(given: NodeCluster) -> ClusterSpec:
    """Returns the cluster of an experiment.

    Raises:
        InputError: no such node type, or more nodes than one without a network.
    """
    kind = as_noted(node_type(given.node_type), given.gpus_per_node, given.network_bytes_per_s)
    cluster = cluster_of(kind, given.gpus)
    if given.storage_bytes_per_s is None:
        return cluster
    link = LinkSpec.model_validate(
        {"name": "storage", "bytes_per_s": f"{given.storage_bytes_per_s} B/s", "latency_s": "1 ms",
         "source": "the experiment"}
    )  # fmt: skip
    return cluster.model_copy(update={"storage": link})


def engine_from(setup: EngineSetup, model: ModelSpec, cluster: ClusterSpec) -> EngineModel:
    """Returns the engine of an experiment: given numbers, or priced from model and GPUs."""
    if setup.numbers is not None:
        return setup.numbers
    served = setup.served or served_model(model, setup.release, setup.kv_dtype)
    engine = engine_model(
        served,
        cluster,
        setup.shape,
        software=software_from(setup),
        speculation=setup.speculation,
        max_running=setup.max_running,
    )
    if setup.least_step_s > 0:
        floor = tuple(max(s, setup.least_step_s) for s in engine.decode.base_s)
        table = engine.decode.model_copy(update={"base_s": floor})
        engine = engine.model_copy(update={"decode": table})
    return engine


def software_from(setup: EngineSetup) -> EngineSoftware:
    """Returns the engine's software with the settings of the experiment."""
    named = setup.software
    software = engine_software(named) if isinstance(named, str) else named
    changes: dict[str, Any] = {}
    if setup.memory_fraction is not None:
        changes["memory_fraction"] = setup.memory_fraction
    if setup.max_running is not None:
        changes["max_running"] = setup.max_running
    if setup.step_host_s is not None:
        changes["step_host_s"] = setup.step_host_s
    if not setup.graphs:
        changes["graph_batches"] = ()
    return software.model_copy(update=changes)
