"""Instances of a served model on a cluster: shapes that hold it, their engines, their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.planner.rollouts.choices import Choice, Shape
from flopwright.simulator.rollouts.engine.build import engine_model
from flopwright.simulator.rollouts.engine.cache import Memory, memory
from flopwright.simulator.rollouts.engine.price import Served as Priced
from flopwright.simulator.rollouts.engine.software import engine_software
from flopwright.simulator.rollouts.engine.weights import (
    all_matrices,
    gpu_weight_bytes,
    model_bytes,
)
from flopwright.simulator.rollouts.weight_sync import sync_time
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.loop import LoopScenario
from flopwright.spec.loop_parts import Serving
from flopwright.spec.rollouts.engine import EngineModel
from flopwright.spec.rollouts.engine_served import EngineShape, ServedModel
from flopwright.spec.rollouts.weight_sync import WeightSyncPlan
from flopwright.units import format_bytes, show_bytes

# Instances tried without a bound of their own: a larger one is several nodes of lockstep.
_MOST_GPUS: Final = 64
_SOFTWARE: Final = "vllm"
_BUCKET: Final = "8 GiB"  # checkpoint-engine's default, arXiv 2507.20534 appendix G


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One shape of instance.

    Attributes:
        engine: its times and what it holds where nothing else lies on its GPUs.
        held: what lies on a GPU then.
        model_bytes, tensors: of a whole checkpoint.
    """

    loop: LoopScenario
    model: ServedModel
    shape: EngineShape
    engine: EngineModel
    held: Memory
    model_bytes: int
    tensors: int

    def engine_beside(self, resident_bytes: int) -> EngineModel:
        """Returns the engine where so many bytes of each GPU hold something else.

        Raises:
            InputError: nothing is left for a cache.
        """
        capacity = self.engine.kv_capacity_tokens
        if not resident_bytes or capacity is None or not self.held.token_bytes:
            return self.engine
        left = int(capacity - resident_bytes / self.held.token_bytes * self.shape.dp)
        left -= left % self.engine.block_tokens
        if left < self.engine.block_tokens:
            raise InputError(
                Violation(
                    field="hand_over.states",
                    value="hbm",
                    rule="training states leave no room for a cache beside the engine's weights",
                    limit=f"{show_bytes(self.held.cache_bytes)} a GPU",
                    nearest_fix="keep the states in dram or nvme while generating",
                )
            )
        return self.engine.model_copy(update={"kv_capacity_tokens": left})

    def memory(self, resident_bytes: int) -> dict[str, int]:
        """Returns bytes of a GPU by what they are, in generation."""
        return {
            "engine weights": int(self.held.weight_bytes),
            "cache": max(0, int(self.held.cache_bytes - resident_bytes)),
            "engine workspace": int(self.held.workspace_bytes),
        }

    def sync_s(self, choice: Choice, update_gpus: int) -> float:
        """Returns the seconds until all instances hold new weights, in pipelined buckets."""
        assert self.loop.cluster is not None
        given = {
            "path": "broadcast",
            "weights": format_bytes(self.model_bytes),
            "tensors": self.tensors,
            "bucket": _BUCKET,
            "source": "host" if choice.layout == "colocated" else "gpu",
            "senders": update_gpus,
            "receivers": choice.instances * choice.gpus_per_instance,
            "engine_ranks": choice.gpus_per_instance,
            "pipelined": True,
        }
        plan = WeightSyncPlan.model_validate(given)
        return sync_time(plan, self.loop.cluster).sync_s


def served_shapes(loop: LoopScenario) -> tuple[tuple[EngineShape, ...], tuple[Violation, ...]]:
    """Returns the shapes of instance whose GPUs hold the weights, and why others do not.

    Bounds of the search on tp and ep hold; a shape that is larger than the loop is none.
    """
    assert loop.serve is not None
    assert loop.cluster is not None
    model = loop.serve.as_served()
    moe = any(group.moe is not None for group in model.layers)
    room = loop.cluster.node.gpu.hbm_bytes * 0.9
    found: list[EngineShape] = []
    lacking: list[tuple[float, EngineShape]] = []
    for shape in _shapes(loop, loop.cluster, moe=moe):
        need = gpu_weight_bytes(model, shape)
        if need < room:
            found.append(shape)
        else:
            lacking.append((need, shape))
    return tuple(found), tuple(
        Violation(
            field="generation.gpus_per_instance",
            value=f"tp{shape.tp} ep{shape.ep}: {show_bytes(need)} of weights a GPU",
            rule="the GPUs of an instance must hold its weights",
            limit=show_bytes(room),
            nearest_fix="more GPUs an instance, or a smaller weight format",
        )
        for need, shape in sorted(lacking, key=lambda pair: pair[0])[:1]
    )


def _shapes(loop: LoopScenario, cluster: ClusterSpec, *, moe: bool) -> list[EngineShape]:
    domain = cluster.node.domain_gpus
    out: dict[tuple[int, int, int], EngineShape] = {}
    gpus = 1
    while gpus <= min(_MOST_GPUS, loop.num_gpus):
        tps = [t for t in (1, 2, 4, 8, 16, 32) if gpus % t == 0 and t <= max(domain, 1) * 2]
        for tp in tps:
            for ep in _expert_groups(tp, gpus, moe=moe):
                if loop.search.tp and tp not in loop.search.tp:
                    continue
                if loop.search.ep and ep not in loop.search.ep:
                    continue
                out[(gpus, tp, ep)] = EngineShape(tp=tp, dp=gpus // tp, ep=ep)
        gpus *= 2
    return [s for s in out.values() if loop.num_gpus % s.gpus == 0]


def _expert_groups(tp: int, gpus: int, *, moe: bool) -> tuple[int, ...]:
    if tp == gpus:
        return tuple(sorted({1, gpus})) if moe else (1,)
    return (gpus,) if moe else ()


def served(loop: LoopScenario, serve: Serving, shape: EngineShape) -> Served:
    """Returns one shape with its engine.

    Raises:
        InputError: the cluster or the model cannot be priced so, or no room for a cache is left.
    """
    assert loop.cluster is not None
    model = serve.as_served()
    software = serve.software or _SOFTWARE
    if isinstance(software, str):
        software = engine_software(software)
    on = Priced(model=model, cluster=loop.cluster, shape=shape, software=software)
    return Served(
        loop=loop,
        model=model,
        shape=shape,
        engine=engine_model(model, loop.cluster, shape, software=software),
        held=memory(on),
        model_bytes=int(model_bytes(model)),
        tensors=sum(count * matrix.stack for count, matrix in all_matrices(model)),
    )


def shape_of(shape: EngineShape) -> Shape:
    """Returns a served shape as an axis of the search."""
    return Shape(gpus=shape.gpus, tp=shape.tp, ep=shape.ep)
