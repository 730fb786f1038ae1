"""How many GPUs hold a model: its weights alone, and with caches at a context and concurrency."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from flopwright.simulator.hardware.nodes.types import cluster_of
from flopwright.simulator.hardware.nodes.types import node_type as node_type_of
from flopwright.simulator.rollouts.engine.cache import Memory, memory
from flopwright.simulator.rollouts.engine.price import Served
from flopwright.simulator.rollouts.engine.weights import model_bytes
from flopwright.spec.cluster import GpuSpec
from flopwright.spec.rollouts.engine_served import EngineShape, EngineSoftware, ServedModel

MAX_GPUS: Final = 512


def gpus_for_weights(weight_bytes: float, gpu_bytes: float) -> int:
    """Returns the fewest GPUs of a memory that hold so many bytes, with nothing beside them."""
    return max(math.ceil(weight_bytes / gpu_bytes), 1)


def fewest_for_weights(model: ServedModel, gpu: GpuSpec) -> int:
    """Returns the fewest GPUs that hold the released weights and nothing else.

    A GPU's memory is what its driver and libraries leave of it (GpuSpec.reserved).
    """
    return gpus_for_weights(model_bytes(model), gpu.hbm_bytes - gpu.reserved_bytes)


def shapes_of(model: ServedModel, gpus: int, domain: int) -> Iterator[EngineShape]:
    """Yields the ways of laying one instance on so many GPUs.

    tp divides the heads of every layer; experts are dealt over all GPUs where there are as many
    experts, else each is cut. Tensor parallelism beyond one NVLink domain is among them.
    """
    heads = math.gcd(*(group.attention.num_heads for group in model.layers))
    experts = min((g.moe.num_experts for g in model.layers if g.moe), default=0)
    for tp in range(1, gpus + 1):
        if gpus % tp or heads % tp or (tp > domain and tp != gpus):
            continue
        dp = gpus // tp
        if dp > 1 and (not experts or experts < gpus):
            continue  # more groups of a dense model are more instances
        yield EngineShape(tp=tp, dp=dp, ep=gpus if experts >= gpus else 1)


@dataclass(frozen=True, slots=True)
class Holding:
    """An instance that holds a model with its caches.

    Attributes:
        sequences: sequences of the asked context that fit the instance at once.
        replicas: instances side by side that hold all that was asked for.
    """

    on: Served
    memory: Memory
    sequences: int
    replicas: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.on.shape.gpus * self.replicas


def holdings(
    model: ServedModel, node_type: str, software: EngineSoftware, gpus: int, context: int
) -> list[Holding]:
    """Returns the layouts on so many GPUs that hold a sequence of the context, most first."""
    cluster = cluster_of(node_type, gpus)
    found = []
    for shape in shapes_of(model, gpus, cluster.node.domain_gpus):
        on = Served(model=model, cluster=cluster, shape=shape, software=software)
        held = memory(on)
        sequences = held.sequences(context, software.block_tokens) * shape.dp
        if held.cache_bytes > 0 and sequences >= 1:
            found.append(Holding(on, held, sequences))
    return sorted(found, key=lambda h: (-h.sequences, h.on.shape.tp))


def gpu_counts(node_type: str, most: int = MAX_GPUS) -> Iterator[int]:
    """Yields GPU counts an engine runs on: powers of two in a node, then whole nodes."""
    whole = node_type_of(node_type).node.gpus
    count = 1
    while count < whole:
        yield count
        count *= 2
    yield from range(whole, most + 1, whole)


def fewest_gpus(
    model: ServedModel,
    node_type: str,
    software: EngineSoftware,
    context: int,
    concurrency: int = 1,
    most: int = MAX_GPUS,
) -> list[Holding]:
    """Returns the layouts on the fewest GPUs, of one instance or alike ones, that hold it, or [].

    Args:
        context: tokens of each sequence; concurrency: sequences at once.
    """
    best: list[Holding] = []
    for gpus in gpu_counts(node_type, most):
        if best and gpus > best[0].gpus:
            break
        for held in holdings(model, node_type, software, gpus, context):
            found = replace(held, replicas=math.ceil(concurrency / held.sequences))
            if found.gpus > most or (best and found.gpus > best[0].gpus):
                continue
            best = [*(h for h in best if h.gpus == found.gpus), found]
    return best
