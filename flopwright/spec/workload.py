"""What is trained: tokens, batch, context, precision, optimizer, learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    model_validator,
)

from flopwright.spec.base import BrokenRulesError, Grown, Spec
from flopwright.spec.cluster import Dtype
from flopwright.spec.model import RopeScaling
from flopwright.spec.packing import Packing
from flopwright.spec.phases import MAX_BATCH as MAX_BATCH
from flopwright.spec.phases import (
    MAX_LEVELS,
    MAX_SEQ_LEN,
    BatchLevel,
    BatchRamp,
    TrainingPhase,
    batch_levels,
)
from flopwright.spec.phases import LearningRate as LearningRate
from flopwright.units import Tokens

_MAX_TOKENS: Final = 10**18
# The name of the phase that a workload's own fields describe.
FIRST_PHASE: Final = "pretrain"
# Fields of a phase that are the workload's where it leaves them out.
_OF_PHASES: Final = ("seq_len", "global_batch_size", "mixture", "rope_scaling")


LoraTargets = Literal["all", "attention", "qkv"]
GemmRecipe = Literal["same", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"]


class Precision(Grown):
    """Formats of the numbers kept: compute and weights, gradient sums, optimizer state.

    Attributes:
        master_weights: the copy that the optimizer updates; "none" where it updates the
            weights themselves (they are wide enough).
        gemm: what matrix products of the layers (not the head, not the router) multiply:
            "same" as compute, FP8 with a scale a tensor or a 1x128 block, MXFP8 (a scale for
            32 numbers), NVFP4 (a scale for 16). The casts are priced too.
        frozen_weights: how weights that are not trained are stored (LoRA); None: as weights.
    """

    later_fields = ("gemm", "frozen_weights")

    compute: Dtype = "bf16"
    weights: Dtype = "bf16"
    gradients: Dtype = "fp32"
    master_weights: Dtype | Literal["none"] = "fp32"
    optimizer_state: Dtype = "fp32"
    gemm: GemmRecipe = "same"
    frozen_weights: Dtype | None = None


class Optimizer(Grown):
    """The update rule; `muon` treats hidden matrices, AdamW the rest.

    Attributes:
        qk_clip_tau: what no attention logit is to exceed (QK-Clip, arXiv 2507.20534, where it
            is 100); None: logits are not looked at.
        per_head: muon orthogonalises the rows of each head by themselves in the matrices that
            make queries, keys and values (arXiv 2607.24653).
    """

    later_fields = ("qk_clip_tau", "per_head")

    kind: Literal["adamw", "muon"] = "adamw"
    weight_decay: NonNegativeFloat = 0.1
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: PositiveFloat = 1e-8
    momentum: float = Field(default=0.95, ge=0, lt=1)
    gradient_clip: PositiveFloat | None = 1.0
    qk_clip_tau: PositiveFloat | None = None
    per_head: bool = False

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.per_head and self.kind != "muon":
            raise ValueError("per_head goes with kind muon")
        return self

    @property
    def states_per_matrix_weight(self) -> int:
        """State numbers kept for each weight of a hidden matrix: Muon one, AdamW two."""
        return 1 if self.kind == "muon" else 2


class ExpertLoad(Spec):
    """How a step's tokens spread over the experts, and what is done against it.

    Attributes:
        kind: "balanced"; "power_law": the i-th busiest expert has a share proportional to
            i^-exponent; "capacity": every expert takes capacity_factor times the mean, tokens
            beyond are dropped and free places are padded.
        redundant_experts: copies of the busiest experts that a layer has beside its experts,
            spread over the expert group; a copy takes an equal part of its expert's tokens.
    """

    kind: Literal["balanced", "power_law", "capacity"] = "balanced"
    exponent: float = Field(default=0.0, ge=0, le=10)
    capacity_factor: float = Field(default=1.0, gt=0, le=100)
    redundant_experts: int = Field(default=0, ge=0, le=2**16)


class Workload(Grown):
    """A training run.

    Attributes:
        seq_len: tokens a sequence.
        global_batch_size: sequences an optimizer step.
        total_tokens: the token budget; the number of steps follows from it.
        lora_rank: rank of the adapters beside matrices of the layers, which alone are trained;
            None: all weights are trained.
        lora_targets: which matrices have one: all but the router, those of the attention, or
            those that make queries, keys and values.
        expert_load: how tokens spread over experts.
        batch_ramp: smaller batches before the full one.
        packing: documents of a row see only themselves; None: attention crosses them.
        mixture: name of the data's mixture.
        rope_scaling: of the positions in this phase: "none" for plain ones; None: the model's.
        later_phases: what follows when total_tokens are through; the other fields describe
            the first phase alone.
    """

    later_fields = (
        "lora_rank",
        "lora_targets",
        "expert_load",
        "batch_ramp",
        "packing",
        "mixture",
        "rope_scaling",
        "later_phases",
    )

    kind: Literal["pretrain"] = "pretrain"
    seq_len: int = Field(ge=1, le=MAX_SEQ_LEN)
    global_batch_size: int = Field(ge=1, le=MAX_BATCH)
    total_tokens: Tokens
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    learning_rate: LearningRate = LearningRate()
    seed: NonNegativeInt = 0
    lora_rank: int | None = Field(default=None, ge=1, le=2**16)
    lora_targets: LoraTargets = "all"
    expert_load: ExpertLoad = ExpertLoad()
    batch_ramp: BatchRamp | None = None
    packing: Packing | None = None
    mixture: str | None = Field(default=None, min_length=1)
    rope_scaling: RopeScaling | Literal["none"] | None = None
    later_phases: tuple[TrainingPhase, ...] = ()

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step of the full batch."""
        return self.seq_len * self.global_batch_size

    @property
    def batch_levels(self) -> tuple[BatchLevel, ...]:
        """The batches of the steps in order: one level without a ramp."""
        full, total = self.global_batch_size, self.total_tokens
        return batch_levels(self.seq_len, full, total, self.batch_ramp)

    @property
    def batches(self) -> tuple[int, ...]:
        """The sizes that a step's batch has at some time: a ramp's and the full one."""
        if self.batch_ramp is None:
            return (self.global_batch_size,)
        levels = (level.batch for level in self.batch_levels)
        return tuple(dict.fromkeys((*levels, self.global_batch_size)))

    @property
    def num_steps(self) -> int:
        """Optimizer steps to the token budget; the last one may be partly past it."""
        if self.batch_ramp is None:
            return -(-self.total_tokens // self.tokens_per_step)
        return sum(level.steps for level in self.batch_levels)

    @property
    def num_full_steps(self) -> int:
        """Optimizer steps that lie wholly inside the token budget."""
        return self.steps_within(self.total_tokens)

    def steps_within(self, tokens: int) -> int:
        """Returns the optimizer steps that lie wholly inside the first `tokens` tokens."""
        if self.batch_ramp is None:
            return tokens // self.tokens_per_step
        inside = (
            min(level.steps, (tokens - level.first_token) // (level.batch * self.seq_len))
            for level in self.batch_levels
            if level.first_token <= tokens
        )
        return sum(inside)

    @model_validator(mode="after")
    def _rules(self) -> Self:
        broken = [*self._broken_budget(), *self._broken_ramp()]
        broken += self._broken_rate(steps_known=not broken)
        broken += [text for text in self._broken_phases() if text not in broken]
        if broken:
            raise BrokenRulesError(broken)
        return self

    def _broken_budget(self) -> Iterator[str]:
        if self.total_tokens > _MAX_TOKENS:
            yield f"total_tokens must not exceed {_MAX_TOKENS:.0e}"
        if self.total_tokens < self.tokens_per_step:
            yield (
                f"total_tokens ({self.total_tokens}) must hold at least one step "
                f"of {self.tokens_per_step} tokens"
            )

    def _broken_ramp(self) -> Iterator[str]:
        ramp, full = self.batch_ramp, self.global_batch_size
        if ramp is None:
            return
        if ramp.start >= full or (full - ramp.start) % ramp.increment:
            yield (
                f"batch_ramp must reach global_batch_size ({full}) from {ramp.start} by steps "
                f"of {ramp.increment}"
            )
        elif len(ramp.batches(full)) > MAX_LEVELS:
            yield f"batch_ramp must not go through more than {MAX_LEVELS} batches"
        if ramp.tokens > self.total_tokens:
            yield (
                f"batch_ramp.tokens ({ramp.tokens}) must not exceed total_tokens "
                f"({self.total_tokens})"
            )

    def _broken_rate(self, *, steps_known: bool) -> Iterator[str]:
        rate = self.learning_rate
        if steps_known and rate.warmup_steps > self.num_steps:
            yield (
                f"learning_rate.warmup_steps ({rate.warmup_steps}) must not exceed the "
                f"{self.num_steps} steps of total_tokens ({self.total_tokens}): the rate would "
                "never reach its peak"
            )
        if rate.hold_until_tokens is not None and rate.hold_until_tokens > self.total_tokens:
            yield (
                f"learning_rate.hold_until_tokens ({rate.hold_until_tokens}) must not exceed "
                f"total_tokens ({self.total_tokens})"
            )

    def _broken_phases(self) -> Iterator[str]:
        names = [FIRST_PHASE, *(phase.name for phase in self.later_phases)]
        for name in sorted({n for i, n in enumerate(names) if n in names[:i]}):
            yield f"two phases are named {name!r} ({FIRST_PHASE!r} is the workload's own)"
        for phase in self.later_phases:
            try:
                self.of_phase(phase)
            except ValidationError as error:
                for each in error.errors():
                    broken = each.get("ctx", {}).get("error")
                    texts = getattr(broken, "texts", (each["msg"].removeprefix("Value error, "),))
                    yield from (f"phase {phase.name!r}: {text}" for text in texts)

    def of_phase(self, phase: TrainingPhase) -> Workload:
        """Returns a later phase as a workload of its own: what it leaves out is this one's."""
        own = {name: getattr(self, name) for name in type(self).model_fields}
        own |= {"later_phases": (), "batch_ramp": phase.batch_ramp}
        for name in ("total_tokens", "learning_rate", *_OF_PHASES):
            value = getattr(phase, name)
            own[name] = own[name] if value is None else value
        return Workload(**own)

    def alone(self) -> Workload:
        """Returns the first phase as a workload of its own."""
        return self.model_copy(update={"later_phases": ()})
