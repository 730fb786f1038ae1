"""One RL iteration on given GPUs: what is generated, on which engines, how it is trained.

The layout says which phases share GPUs and which run side by side; the numbers of engines,
update and synchronisation stand beside it, so that layouts are compared on equal parts.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.base import Spec
from flopwright.spec.rollouts.engine import EngineModel
from flopwright.spec.rollouts.lengths import ContextTokens, Count, PhaseSeconds, PositiveTokens

Routing = Literal[
    "group_round_robin",
    "group_equal_tokens",
    "request_equal_tokens",
    "dedicated_long",
    "isolated_groups",
    "pooled",
    "pooled_longest_first",
    "least_loaded",
]
Sigma = Annotated[float, Field(ge=0.0, le=5.0)]


class GroupLengths(Spec):
    """Tokens of a response: lognormal, cut at `cap`, correlated between samples of a prompt.

    Attributes:
        mean: tokens after the cut; None: unknown, to be derived or fitted.
        sigma: standard deviation of the logarithm before the cut; 0: all are equal.
        band: its two ends where it is assumed; predictions are repeated there.
        cap: the longest response.
        cut_share: share of the responses that the cap cuts; gives the mean where that is None.
        group_share: share of the variance of the logarithm that samples of a prompt share.
    """

    mean: PositiveTokens | None = None
    sigma: Sigma
    band: tuple[Sigma, Sigma] | None = None
    cap: PositiveTokens
    cut_share: float | None = Field(default=None, gt=0, lt=1)
    group_share: float = Field(default=0.65, ge=0, le=1)

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.mean is not None and self.mean >= self.cap and self.sigma > 0:
            raise ValueError(f"mean ({self.mean}) must be below cap ({self.cap})")
        if self.mean is not None and self.cut_share is not None:
            raise ValueError("give mean or cut_share, not both: one follows from the other")
        if self.band is not None and not self.band[0] <= self.sigma <= self.band[1]:
            raise ValueError(f"band must hold sigma ({self.sigma})")
        return self


class Batch(Spec):
    """What one step consumes: prompts with all their samples."""

    prompts: Count
    samples: Count = 1
    prompt_tokens: ContextTokens = 0
    lengths: GroupLengths

    @property
    def responses(self) -> int:
        """Responses a step consumes."""
        return self.prompts * self.samples


class Fleet(Spec):
    """The engines that generate.

    Attributes:
        instances: engines; each is `engine`.
        routing: who goes where. "group_*": all samples of a prompt to one instance, in turns
            or so that (known) tokens are equal; "request_equal_tokens": single responses;
            "dedicated_long": the longest `long_share` of the responses to `long_instances`
            (None: as many as their share of the tokens);
            "isolated_groups": the same by group, as far as `capture` of them are known
            before; "pooled*": any instance at any time, in pieces of `chunk_tokens`, through
            a shared cache; "least_loaded": a new group to the instance with the least to do.
        wake_s: time until the engines run again after training.
    """

    engine: EngineModel
    instances: Count
    routing: Routing = "least_loaded"
    long_share: float = Field(default=0.2, gt=0, lt=1)
    long_instances: Count | None = None
    capture: float = Field(default=1.0, ge=0, le=1)
    chunk_tokens: PositiveTokens = 8192
    wake_s: PhaseSeconds = Field(default=0.0, alias="wake")


class UpdatePhase(Spec):
    """The training step on what was generated.

    Attributes:
        gpus: GPUs that train; plan: how they share the work.
        mini_batches: optimizer steps a step of the loop.
        micro_batch_tokens: most tokens of a micro-batch of one data-parallel rank (its cp
            ranks together); None: `plan.micro_batch_size` sequences.
        log_prob: forward passes over all tokens before the update: the old policy's, the
            reference model's, a teacher's (weights streamed from the host).
        ptx_share: pre-training tokens in a batch, as a share of its own.
        state_on_host: between updates weights and optimizer stand in host memory.
        mfu: measured model FLOP utilisation, in place of the simulator's step.
        stack: software by name (simulator/accuracy/named_stacks.py).
        overhead: seconds of the update and its forward passes over those of the stack, for a
            trainer that has no stack of its own.
    """

    gpus: Count
    plan: ParallelPlan
    mini_batches: Count = 1
    micro_batch_tokens: PositiveTokens | None = None
    log_prob: tuple[Literal["old", "reference", "teacher"], ...] = ()
    ptx_share: float = Field(default=0.0, ge=0, le=10)
    state_on_host: bool = False
    mfu: float | None = Field(default=None, gt=0, le=1)
    stack: str = ""
    overhead: float = Field(default=1.0, ge=0.1, le=10)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.plan.world_size != self.gpus:
            raise ValueError(f"plan needs {self.plan.world_size} GPUs, and gpus is {self.gpus}")
        return self


class Colocated(Spec):
    """Generation and training take turns on the same GPUs.

    Attributes:
        in_flight: prompts generated at once over prompts a step consumes. Above 1 the step
            goes on when enough groups are complete, and the others keep their tokens
            (over-issue with partial rollout).
    """

    kind: Literal["colocated"] = "colocated"
    in_flight: float = Field(default=1.0, ge=1, le=100)


class SyncSplit(Spec):
    """Engines and trainer on GPUs of their own, in turns: one waits while the other works."""

    kind: Literal["sync_split"] = "sync_split"


class OneStepOff(Spec):
    """Engines generate the next batch while the trainer works on the last one."""

    kind: Literal["one_step_off"] = "one_step_off"


class FullyAsync(Spec):
    """Engines stream groups into a buffer, the trainer takes a batch when there is one.

    Attributes:
        staleness: eta: the n-th prompt starts only when floor((n - 1) / prompts a step) is at
            most version + eta; a share of a step counts ("0.5"); None: no bound.
        max_in_flight: prompts generated at once; None: as many as the bound lets in.
        sync_every: optimizer batches between two synchronisations; a step of the loop is one
            of them.
        on_sync: what becomes of responses that run at a synchronisation. "interrupt": they
            stop, lose their cache, are prefilled again and go on under the new weights;
            "keep": they go on with the cache they have; "drain": an engine takes nothing new
            and changes its weights when its last response is done.
        order: whether the trainer takes groups as they are complete or as they were started.
        lend_below: the trainer's GPUs generate too while it waits and the buffer holds less
            than this share of a batch (elastic split); None: never.
        lend_instances: engines that the trainer's GPUs make while they are lent; lend_s: time
            of such a switch, either way.
    """

    kind: Literal["async"] = "async"
    staleness: float | None = Field(default=None, ge=0, le=1e6)
    max_in_flight: Count | None = None
    sync_every: Count = 1
    on_sync: Literal["interrupt", "keep", "drain"] = "interrupt"
    order: Literal["completion", "submission"] = "completion"
    lend_below: float | None = Field(default=None, gt=0, le=1)
    lend_instances: PositiveInt | None = None
    lend_s: PhaseSeconds = Field(default=0.0, alias="lend_switch")

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.staleness is None and self.max_in_flight is None:
            raise ValueError("give staleness or max_in_flight: without one the buffer grows")
        if (self.lend_below is None) != (self.lend_instances is None):
            raise ValueError("lend_below and lend_instances go together")
        return self


class ReplicaBatches(Spec):
    """Instances beside the trainer, each with a batch of its own (Laminar's rollouts).

    Attributes:
        prompts: that an instance takes at once, under the newest weights, when it is empty.
        repack_every_s: instances that are past the peak of their cache use are packed into
            fewer so often, and those that are emptied begin anew; None: never.
    """

    kind: Literal["replica_batches"] = "replica_batches"
    prompts: Count
    repack_every_s: Annotated[PhaseSeconds, Field(gt=0)] | None = Field(
        default=None, alias="repack_every"
    )


Layout = Annotated[
    Colocated | SyncSplit | OneStepOff | FullyAsync | ReplicaBatches,
    Field(discriminator="kind"),
]


class PhaseTimes(Spec):
    """Seconds of what is not generation, where they are given instead of computed."""

    update_s: PhaseSeconds = Field(alias="update")
    log_prob_s: PhaseSeconds = Field(default=0.0, alias="log_prob")
    sync_s: PhaseSeconds = Field(default=0.0, alias="sync")
    switch_s: PhaseSeconds = Field(default=0.0, alias="switch")


class LayoutInput(Spec):
    """One iteration with every part priced: what `iteration` simulates.

    Attributes:
        times: the other phases, for a batch of `batch`'s mean tokens.
        driver_s: what belongs to no phase.
    """

    batch: Batch
    fleet: Fleet
    times: PhaseTimes
    layout: Layout = Field(default=Colocated(), discriminator="kind")
    driver_s: PhaseSeconds = Field(default=0.0, alias="driver")
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _whole_batches(self) -> Self:
        layout, prompts = self.layout, self.batch.prompts
        if isinstance(layout, FullyAsync) and prompts % layout.sync_every:
            raise ValueError(
                f"sync_every ({layout.sync_every}) must divide the prompts of a step ({prompts})"
            )
        return self
