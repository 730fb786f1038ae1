"""Attempts that act: turns, tools, the sandboxes they run in, and who judges the result."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from flopwright.spec.base import Spec
from flopwright.spec.rollouts.bounds import BoundedBytes
from flopwright.spec.rollouts.lengths import (
    ContextTokens,
    Count,
    DeterministicLengths,
    EmpiricalLengths,
    ExponentialLengths,
    LognormalLengths,
    ParetoLengths,
    PhaseSeconds,
    PositiveTokens,
)

AnyLengths = Annotated[
    ExponentialLengths
    | LognormalLengths
    | ParetoLengths
    | DeterministicLengths
    | EmpiricalLengths,
    Field(discriminator="kind"),
]


class TimeLaw(Spec):
    """Seconds of something that varies.

    Attributes:
        mean_s: the mean; 0 takes no time whatever the kind is.
        kind: "fixed", "exponential", "lognormal" (`spread` is the standard deviation of the
            logarithm) or "normal" (`spread` is the standard deviation over the mean; what
            would be negative is 0).
        at_most_s: a longer draw is cut there, as a time limit does.
    """

    kind: Literal["fixed", "exponential", "lognormal", "normal"] = "fixed"
    mean_s: PhaseSeconds = Field(default=0.0, alias="mean")
    spread: float = Field(default=1.0, ge=0, le=10)
    at_most_s: PhaseSeconds | None = Field(default=None, alias="at_most")


class Sandbox(Spec):
    """Where tools run: what starting, pausing and resuming cost, and what the hosts hold.

    Attributes:
        create_s: until a new sandbox is ready, image at hand; paid by the first tool call.
        image_pull_s: added where the image is not on the host yet.
        image_hit: share of creations that find it there.
        fork_s: in place of creation for all samples of a prompt but the first: they fork the
            first one's sandbox. None: each is created.
        pause: a sandbox is paused while the model thinks; a paused one holds neither CPU nor
            memory. Otherwise it holds both from its first tool call to the end of the attempt.
        checkpoint_s: to pause; beside decoding, so it delays nothing.
        resume_s: added to every tool call but the first where pausing is on.
        cpus, memory_bytes: of one sandbox while it is not paused; of a host: `host_*`.
        hosts: None: CPU and memory never run short.
        overcommit: promised over physical memory and CPU.
    """

    create_s: PhaseSeconds = Field(default=0.0, alias="create")
    image_pull_s: PhaseSeconds = Field(default=0.0, alias="image_pull")
    image_hit: float = Field(default=1.0, ge=0, le=1)
    fork_s: PhaseSeconds | None = Field(default=None, alias="fork")
    pause: bool = True
    checkpoint_s: PhaseSeconds = Field(default=0.0, alias="checkpoint")
    resume_s: PhaseSeconds = Field(default=0.0, alias="resume")
    cpus: float = Field(default=1.0, gt=0, le=1024)
    memory_bytes: BoundedBytes = Field(default=0, alias="memory")
    hosts: Count | None = None
    host_cpus: float = Field(default=128.0, gt=0, le=100_000)
    host_memory_bytes: BoundedBytes = Field(default=2**40, alias="host_memory")
    overcommit: float = Field(default=1.0, ge=1, le=100)

    @property
    def places(self) -> int | None:
        """Sandboxes that can be awake at once over all hosts; None: no limit."""
        if self.hosts is None:
            return None
        each = self.host_cpus * self.overcommit / self.cpus
        if self.memory_bytes:
            each = min(each, self.host_memory_bytes * self.overcommit / self.memory_bytes)
        return self.hosts * int(each + 1e-9)

    @model_validator(mode="after")
    def _one_fits(self) -> Self:
        places = self.places
        if places is not None and places < 1:
            raise ValueError("one sandbox is larger than a host with its overcommit")
        return self


class Agent(Spec):
    """An attempt of many turns: think, call a tool, read what it says, and so on.

    The scenario's `lengths` are the tokens an attempt generates over all its turns; they are
    cut into turns of equal length. A tool call follows every turn but the last.

    Attributes:
        turns: law of the number of turns; or
        tokens_per_turn: tokens after which a tool is called, so that long attempts have more.
        tool_tokens: law of the tokens that a tool call adds to the context.
        tool_time: law of the seconds of a tool call, environment latency included.
        max_context: an attempt ends when its context reaches this.
    """

    turns: AnyLengths | None = None
    tokens_per_turn: PositiveTokens | None = None
    tool_tokens: AnyLengths | None = None
    tool_time: TimeLaw = TimeLaw()
    max_context: PositiveTokens | None = None
    sandbox: Sandbox = Sandbox()

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.turns is None) == (self.tokens_per_turn is None):
            raise ValueError("give one of turns and tokens_per_turn")
        return self


class Reward(Spec):
    """Who says how good an attempt is, beside generation: a queue in front of workers.

    Attributes:
        kind: "none"; "program" takes `time` on one of `workers`; "judge": a model with GPUs of
            its own reads `read_tokens` plus the attempt and writes `verdict_tokens`;
            "tournament": the judge compares the samples of a complete prompt in pairs.
        workers: programs, or verdicts of the judge, that run at once.
        pairs_per_prompt: comparisons of a tournament; None: every pair, K (K - 1) / 2.
        read_tokens_per_s, verdict_tokens_per_s: of one running verdict.
        gpus: that the judge has to itself, counted in the cost of the loop.
    """

    kind: Literal["none", "program", "judge", "tournament"] = "none"
    time: TimeLaw = TimeLaw()
    workers: Count = 1
    pairs_per_prompt: PositiveInt | None = None
    read_tokens: ContextTokens = 0
    verdict_tokens: ContextTokens = 0
    read_tokens_per_s: float = Field(default=10_000.0, gt=0, le=1e9)
    verdict_tokens_per_s: float = Field(default=50.0, gt=0, le=1e9)
    gpus: Annotated[int, Field(ge=0, le=1_000_000)] = 0
