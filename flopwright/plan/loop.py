"""loop_plan.yaml: one plan for both phases of an RL loop, and for what they share.

It says what generates and what trains, how the GPUs go from one to the other, when a round
ends, and what lies in GPU memory, host memory and on the nodes' disks in each phase.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

import flopwright
from flopwright.errors import InputError, Violation
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.base import Spec
from flopwright.spec.loop import LayoutKind, LoopScenario, Place
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import Document, read_yaml
from flopwright.units import Bytes, Seconds, show_bytes

LOOP_SCHEMA_VERSION: Final = 1


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


class HandOver(Spec):
    """How GPUs, weights and states go from one phase to the other.

    Attributes:
        states: where weights, gradients and optimizer state of training lie while generating.
        engine: where the engine's weights lie while training: dropped weights come back with
            the synchronisation, kept ones stay on the GPU.
        to_update_s, to_generation_s: of a co-located loop; 0 elsewhere.
        weight_sync_s: until every instance holds the new weights.
    """

    states: Literal["hbm", "dram", "nvme"] = "hbm"
    engine: Literal["kept", "dropped", "dram"] = "kept"
    to_update_s: Seconds = Field(default=0.0, alias="to_update")
    to_generation_s: Seconds = Field(default=0.0, alias="to_generation")
    weight_sync_s: Seconds = Field(default=0.0, alias="weight_sync")


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


class PredictedLoop(Spec):
    """The prediction's summary as it stands in the plan file, of the mean steady iteration.

    Attributes:
        attempts_per_s: completed attempts over the whole time.
        mean_staleness: policy versions behind.
        usd: of one iteration; None where the cluster has no price.
        bound_by: what binds.
    """

    iteration_s: Seconds = Field(alias="iteration")
    time_s: dict[str, Seconds] = Field(alias="time", default_factory=dict)
    attempts_per_s: NonNegativeFloat
    mean_staleness: NonNegativeFloat
    gpu_hours: NonNegativeFloat
    usd: NonNegativeFloat | None = None
    bound_by: str = ""
    seed: int = 0
    rounds: int = 0


class LoopPlan(Spec):
    """The contents of loop_plan.yaml.

    Attributes:
        scenario_hash, plan_hash: content hashes of the scenario, and of layout, generation,
            update, hand_over and memory together; a plan edited by hand keeps neither.
        staleness_bound: versions an attempt may be behind in an asynchronous loop.
        memory: every place in every phase, as it was checked.
    """

    schema_version: Literal[1] = LOOP_SCHEMA_VERSION
    tool_version: str
    name: str = Field(min_length=1)
    scenario_hash: str
    plan_hash: str
    scenario: LoopScenario
    layout: LayoutKind
    staleness_bound: Annotated[int, Field(ge=0)] | None = None
    generation: GenerationPlan
    update: UpdatePlan
    hand_over: HandOver = HandOver()
    memory: tuple[Budget, ...] = ()
    predicted: PredictedLoop | None = None

    @property
    def gpus(self) -> int:
        """GPUs of the loop: those of both phases, counted once where they are the same."""
        if self.layout == "colocated":
            return self.generation.gpus
        return self.generation.gpus + self.update.gpus

    def contents_hash(self) -> str:
        """Returns the hash of what the plan decides."""
        decided = ("layout", "staleness_bound", "generation", "update", "hand_over", "memory")
        return _Decided(**{name: getattr(self, name) for name in decided}).content_hash()


class _Decided(Spec):
    layout: LayoutKind
    staleness_bound: int | None
    generation: GenerationPlan
    update: UpdatePlan
    hand_over: HandOver
    memory: tuple[Budget, ...]


def make_loop_plan(
    scenario: LoopScenario,
    name: str,
    *,
    layout: LayoutKind,
    staleness_bound: int | None,
    generation: GenerationPlan,
    update: UpdatePlan,
    hand_over: HandOver,
    memory: tuple[Budget, ...],
    predicted: PredictedLoop | None = None,
) -> LoopPlan:
    """Returns a plan with its hashes filled in."""
    plan = LoopPlan(
        tool_version=flopwright.__version__,
        name=name,
        scenario_hash=scenario.content_hash(),
        plan_hash="",
        scenario=scenario,
        layout=layout,
        staleness_bound=staleness_bound,
        generation=generation,
        update=update,
        hand_over=hand_over,
        memory=memory,
        predicted=predicted,
    )
    return plan.model_copy(update={"plan_hash": plan.contents_hash()})


def loop_plan_violations(plan: LoopPlan) -> list[Violation]:
    """Returns what a plan breaks: GPUs that are not there, phases that do not agree, memory."""
    found = []
    if plan.layout == "colocated" and plan.update.gpus != plan.generation.gpus:
        found.append(
            Violation(
                field="update.gpus",
                value=str(plan.update.gpus),
                rule="a co-located loop trains on the GPUs that generate",
                nearest_fix=str(plan.generation.gpus),
            )
        )
    parallel = plan.update.parallel
    if parallel is not None and parallel.world_size != plan.update.gpus:
        found.append(
            Violation(
                field="update.parallel",
                value=f"{parallel.world_size} ranks",
                rule=f"must use the {plan.update.gpus} GPUs that train",
            )
        )
    gpus = plan.scenario.num_gpus
    if plan.gpus > gpus:
        found.append(
            Violation(
                field="generation.gpus",
                value=str(plan.gpus),
                rule="both phases together must not use more GPUs than there are",
                limit=str(gpus),
                nearest_fix=f"leave {plan.gpus - gpus} out",
            )
        )
    broken = (budget.violation() for budget in plan.memory)
    return [*found, *(violation for violation in broken if violation is not None)]


def load_loop_plan(path: str | Path) -> LoopPlan:
    """Returns a plan file, held against its own contents.

    Raises:
        InputError: unreadable or invalid file, a newer schema, hashes that do not match, or
            a plan that breaks a rule.
    """
    document = read_yaml(Path(path))
    _check_version(document)
    plan = validate(LoopPlan, document)
    pairs = (
        ("scenario_hash", plan.scenario_hash, plan.scenario.content_hash()),
        ("plan_hash", plan.plan_hash, plan.contents_hash()),
    )
    found = [
        Violation(
            field=field,
            value=value,
            rule="does not match the contents of the file",
            nearest_fix=f"the contents hash to {actual}; make the plan again",
            file=document.file,
            line=document.line_of((field,)),
        )
        for field, value, actual in pairs
        if value != actual
    ]
    found += loop_plan_violations(plan)
    if found:
        raise InputError(found)
    return plan


def _check_version(document: Document) -> None:
    version = document.data.get("schema_version") if isinstance(document.data, dict) else None
    if isinstance(version, int) and version > LOOP_SCHEMA_VERSION:
        raise InputError(
            Violation(
                file=document.file,
                line=document.line_of(("schema_version",)),
                field="schema_version",
                value=str(version),
                rule="written by a newer flopwright",
                limit=str(LOOP_SCHEMA_VERSION),
                nearest_fix="upgrade flopwright",
            )
        )
