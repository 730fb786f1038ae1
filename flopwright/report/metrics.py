"""Prediction and Measurement: one shape, so that comparing them is field by field.

All numbers are SI: seconds, bytes, FLOP/s. MFU counts model FLOPs (6 a weight and token
that takes part in a product, plus causal attention at half its square), no recompute,
against the dense peak of the compute dtype; HFU counts what was executed.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AllowInfNan,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
)

from flopwright.spec.base import Grown, Spec

# Time classes of a step, exposed (not hidden behind compute); they and "idle" sum to the step.
# "host" is what the processor waits for the program that launches its work.
TIME_CLASSES = (
    "forward",
    "backward",
    "recompute",
    "tp_comm",
    "cp_comm",
    "ep_comm",
    "pp_comm",
    "dp_comm",
    "offload",
    "optimizer",
    "host",
    "idle",
)
# Memory classes of a rank.
MEMORY_CLASSES = (
    "weights",
    "gradients",
    "optimizer_state",
    "activations",
    "temporaries",
    "reserved",
)


class StepMetrics(Spec):
    """One optimizer step.

    Attributes:
        time_s: seconds by time class on the critical rank; sums to step_time_s.
        memory_bytes: for each pipeline stage the bytes by memory class, of its fullest rank.
        hfu: None where executed FLOPs are not known.
    """

    step_time_s: PositiveFloat
    tokens_per_s: PositiveFloat
    tokens_per_s_per_gpu: PositiveFloat
    model_flops_per_s_per_gpu: NonNegativeFloat
    mfu: NonNegativeFloat
    hfu: NonNegativeFloat | None = None
    time_s: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    memory_bytes: tuple[dict[str, NonNegativeInt], ...] = ()

    @property
    def stage_peak_bytes(self) -> tuple[int, ...]:
        """Peak bytes of each pipeline stage, all classes together."""
        return tuple(sum(m.values()) for m in self.memory_bytes)

    @property
    def peak_memory_bytes(self) -> int:
        """Peak bytes of the fullest rank."""
        return max(self.stage_peak_bytes, default=0)

    def tensor_memory_bytes(self) -> int:
        """Bytes of the fullest stage in tensors: what both interpreters can count."""
        return max(
            (sum(v for k, v in m.items() if k != "reserved") for m in self.memory_bytes), default=0
        )


class RoundMetrics(Spec):
    """One rollout round (generation phase, update, weight sync).

    Attributes:
        time_s: seconds by phase; sums to round_time_s.
        tail_s: seconds in which at most a tenth of the attempts of the round still ran.
        gpu_idle_share: share of slot-seconds of the generation phase that decoded nothing.
        staleness: histogram: completed attempts by the number of policy versions behind.
    """

    round_time_s: NonNegativeFloat
    time_s: dict[str, NonNegativeFloat]
    tail_s: NonNegativeFloat
    gpu_idle_share: float = Field(ge=0, le=1)
    tokens_per_s: NonNegativeFloat
    completed: NonNegativeInt
    generated_tokens: NonNegativeInt
    kv_peak_tokens: NonNegativeInt = 0
    parked_tokens: NonNegativeInt = 0
    preemptions: NonNegativeInt = 0
    staleness: dict[int, NonNegativeInt] = Field(default_factory=dict)


class StageMetrics(Spec):
    """One stage of a campaign: wall time and cost."""

    stage: str
    wall_s: NonNegativeFloat
    gpu_s: NonNegativeFloat
    cost_usd: NonNegativeFloat | None = None


class Interval(Spec):
    """A central interval that is meant to hold the truth with the given probability."""

    low: float
    high: float
    probability: float = 0.8


Provenance = Literal["analytic", "calibrated", "extrapolated"]


class Prediction(Spec):
    """What the simulator says of a plan.

    Attributes:
        step_time_interval: of step_time_s.
        flops_per_s_per_gpu: the same step in each convention that reports use: "causal_half"
            (attention at half its square), "full" (the whole square), "full_recompute" (the
            whole square, and every layer's forward once more, as if all were recomputed).
        assumptions: what was assumed because nothing said otherwise.
    """

    kind: Literal["prediction"] = "prediction"
    plan_name: str
    metrics: StepMetrics
    step_time_interval: Interval
    provenance: Provenance
    calibration_id: str | None = None
    flops_per_s_per_gpu: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    assumptions: tuple[str, ...] = ()


class Fingerprint(Grown):
    """Where a measurement comes from: hardware and software, as far as they can be asked.

    Attributes:
        host: which of several equal machines, where somebody said so; their runs are learnt
            from together, but each machine's are a series of their own.
    """

    later_fields: ClassVar[tuple[str, ...]] = ("host",)

    machine: str
    processor: str
    num_cores: int
    world_size: int
    threads_per_rank: int
    memory_bytes: int
    gpu: str | None = None
    python: str
    packages: dict[str, str] = Field(default_factory=dict)
    tool_version: str
    host: str = ""

    def stack_id(self) -> str:
        """Returns the id of hardware and software together; a calibration is local to it."""
        return self.model_copy(update={"host": ""}).content_hash()


Metrics = Annotated[StepMetrics | RoundMetrics | StageMetrics, Field(union_mode="left_to_right")]


# A diverged run has losses that are no numbers; that is a result, and JSON's word for it is null.
Loss = Annotated[
    float,
    AllowInfNan(),
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, when_used="json"),
]


class RankMetrics(Spec):
    """What one rank was busy with in a step; waiting for partners is nobody's work, and left out.

    Attributes:
        stage: its pipeline stage.
        time_s: seconds by time class, hidden ones included, so that they need not sum to the
            step.
        kernel_s: seconds of compute by kernel class (gemm, grouped_gemm, attention,
            attention_backward, memory_bound, optimizer, quantize, head), where a profiler saw
            kernels; empty where only whole actions were timed.
    """

    rank: NonNegativeInt
    stage: NonNegativeInt
    time_s: dict[str, NonNegativeFloat]
    kernel_s: dict[str, NonNegativeFloat] = Field(default_factory=dict)


class LinkTime(Spec):
    """What travelled in a step between the same ranks: seconds from the last partner's arrival.

    Attributes:
        cls: time class of the traffic.
        ranks: (sender, receiver) of pipeline messages, else the group of a collective.
        seconds, nbytes, count: of all its messages in a step together.
    """

    cls: str
    ranks: tuple[NonNegativeInt, ...]
    seconds: NonNegativeFloat
    nbytes: NonNegativeFloat = 0.0
    count: NonNegativeFloat = 0.0


class Measurement(Grown):
    """What a real run showed: medians over kept steps, and the spread around them.

    Attributes:
        plan: the plan file's data, so that a measurement can be predicted again later.
        step_time_samples_s: kept steps, in order; median, p10 and p90 are over these.
        discarded_steps: warm-up steps not kept.
        mismatch: what differed from the plan and was allowed by --allow-mismatch.
        losses: training loss by step (nats a token), all steps.
        ranks, links: each rank's busy seconds and each link's; empty where only the whole step
            was timed.
        expert_rows: by rank, rows that its experts held when it held most bytes, over what even
            routing gives each; empty where no experts stand on other ranks.
    """

    later_fields: ClassVar[tuple[str, ...]] = ("ranks", "links", "expert_rows")

    kind: Literal["measurement"] = "measurement"
    id: str
    created: str
    plan_name: str
    plan: dict[str, Any]
    metrics: StepMetrics
    step_time_p10_s: PositiveFloat
    step_time_p90_s: PositiveFloat
    step_time_samples_s: tuple[float, ...]
    discarded_steps: NonNegativeInt
    fingerprint: Fingerprint
    losses: tuple[Loss, ...] = ()
    held_out_loss: Loss | None = None
    noise_floor: float | None = None
    mismatch: tuple[str, ...] = ()
    ranks: tuple[RankMetrics, ...] = ()
    links: tuple[LinkTime, ...] = ()
    expert_rows: tuple[NonNegativeFloat, ...] = ()
