"""The parts of an RL loop's plan: what generates, what trains, the hand-over, every place."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from flopwright.errors import Violation
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.base import Grown, Spec
from flopwright.spec.loop_parts import Place
from flopwright.units import Bytes, Seconds, show_bytes

PhaseName = Literal["generation", "update"]
Who = Literal["all", "generation", "update"]
# What a byte is counted for: a GPU's own memory, a node's otherwise.
PER: Final[dict[str, str]] = {"hbm": "a GPU", "dram": "a node", "nvme": "a node"}
PLACE_WORDS: Final[dict[str, str]] = {
    "hbm": "GPU memory",
    "dram": "host memory",
    "nvme": "the node's disks",
}


class GenerationPlan(Spec):
    """What generates.

    Attributes:
        gpus: of all instances together; in a co-located loop they train too.
        tp, ep: of one instance; 0 where the scenario gives the engine in numbers.
        slots_per_instance: attempts an instance decodes at once; None: what its cache holds.
        stop_fraction: lambda, the share of the attempts in flight whose end ends a round.
        host_pool_bytes: host memory of a node for caches that leave the GPUs.
        throttled: admission goes by active and queued attempts and the use of the cache.
    """

    gpus: PositiveInt
    instances: PositiveInt
    gpus_per_instance: PositiveInt
    tp: Annotated[int, Field(ge=0)] = 0
    ep: Annotated[int, Field(ge=0)] = 0
    slots_per_instance: PositiveInt | None = None
    stop_fraction: float = Field(alias="lambda", gt=0, le=1)
    host_pool_bytes: Bytes = Field(default=0, alias="host_pool")
    throttled: bool = False

    @model_validator(mode="after")
    def _whole_instances(self) -> Self:
        if self.instances * self.gpus_per_instance != self.gpus:
            raise ValueError(
                f"gpus ({self.gpus}) must be instances ({self.instances}) * gpus_per_instance "
                f"({self.gpus_per_instance})"
            )
        return self

    def label(self) -> str:
        """Returns the instances in short: 8 x tp8 ep32, 256 slots, lambda 0.9."""
        shape = [f"tp{self.tp}"] if self.tp > 1 else []
        shape += [f"ep{self.ep}"] if self.ep > 1 else []
        text = f"{self.instances} x {self.gpus_per_instance} GPU"
        text += f" ({' '.join(shape)})" if shape else ""
        slots = "all it holds" if self.slots_per_instance is None else self.slots_per_instance
        text += f", slots {slots}, lambda {self.stop_fraction:g}"
        return text + (", throttled" if self.throttled else "")


class UpdatePlan(Spec):
    """What trains.

    Attributes:
        gpus: that train; in a co-located loop those that generate.
        parallel: how a step is split; None where the scenario states the update's time.
    """

    gpus: PositiveInt
    parallel: ParallelPlan | None = None


class HandOver(Grown):
    """How GPUs, weights and states go from one phase to the other.

    Attributes:
        states: where weights, gradients and optimizer state of training lie while generating.
        engine: where the engine's weights lie while training: dropped weights come back with
            the synchronisation, kept ones stay on the GPU.
        to_update_s, to_generation_s: of a co-located loop; 0 elsewhere.
        weight_sync_s: until every instance holds the new weights.
        lent_gpus: of those that train, how many generate while these wait (asynchronous loops);
            lend_s until they do, give_back_s until they train again.
        lent_below: they are lent where the buffer holds less than this share of an update.
    """

    later_fields: ClassVar[tuple[str, ...]] = (
        "lent_gpus", "lend_s", "give_back_s", "lent_below",
    )  # fmt: skip

    states: Literal["hbm", "dram", "nvme"] = "hbm"
    engine: Literal["kept", "dropped", "dram"] = "kept"
    to_update_s: Seconds = Field(default=0.0, alias="to_update")
    to_generation_s: Seconds = Field(default=0.0, alias="to_generation")
    weight_sync_s: Seconds = Field(default=0.0, alias="weight_sync")
    lent_gpus: NonNegativeInt = 0
    lend_s: Seconds = 0.0
    give_back_s: Seconds = 0.0
    lent_below: float = Field(default=1.0, gt=0, le=1)


class Budget(Spec):
    """What lies in one place in one phase: bytes of a GPU (hbm) or of a node (dram, nvme).

    Attributes:
        gpus: which GPUs, or the nodes they are in.
        holds: bytes by what they are; limit_bytes: what there is.
    """

    place: Place
    phase: PhaseName
    gpus: Who = "all"
    holds: dict[str, Bytes] = Field(default_factory=dict)
    limit_bytes: Bytes = Field(alias="limit")

    @property
    def used_bytes(self) -> int:
        """Bytes of everything that lies there."""
        return sum(self.holds.values())

    def violation(self) -> Violation | None:
        """Returns what it breaks, with the largest part named; None where all of it fits."""
        if self.used_bytes <= self.limit_bytes:
            return None
        largest = max(self.holds, key=lambda name: self.holds[name])
        short = self.used_bytes - self.limit_bytes
        return Violation(
            field=f"memory.{self.place}.{self.phase}",
            value=f"{show_bytes(self.used_bytes)} {PER[self.place]}",
            rule=f"{PLACE_WORDS[self.place]} must hold all that lies there in {self.phase}",
            limit=f"{show_bytes(self.limit_bytes)} {PER[self.place]}",
            nearest_fix=_fix(self.place, largest, self.holds[largest], short),
        )


_FIXES: Final = {
    "kv_pool": "make the host pool {left}",
    "training states": "keep the training states elsewhere ({elsewhere})",
    "engine weights": "spread an instance over more GPUs",
}
_ELSEWHERE: Final = {"hbm": "dram or nvme", "dram": "nvme", "nvme": "dram"}


def _fix(place: str, largest: str, size: int, short: int) -> str:
    text = _FIXES.get(largest, "free {short}")
    left = f"at most {show_bytes(size - short)}" if size > short else "empty"
    fix = text.format(left=left, elsewhere=_ELSEWHERE[place], short=show_bytes(short))
    return f"{fix}; largest part: {largest}, {show_bytes(size)}"
