"""What engines of a fleet work on, and what a step of theirs costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from flopwright.spec.rollouts.engine import EngineModel

# A table is written out up to this many attempts: no engine runs more.
_MOST_RUNNING = 8192


@dataclass(slots=True)
class Work:
    """Responses to generate, by id: parallel lists.

    Attributes:
        prompt, length: tokens; group: the prompt each belongs to.
        target: tokens after which a server gives it back: its length, or a piece's end.
        tokens: generated so far; finish_s: when it was complete, nan before.
    """

    prompt: list[int]
    length: list[int]
    group: list[int]
    target: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.target = self.target or list(self.length)
        self.tokens = self.tokens or [0] * len(self.length)
        self.finish_s = self.finish_s or [math.nan] * len(self.length)

    def extend(self, prompt: int, lengths: list[int], group: int) -> range:
        """Adds the samples of one prompt; returns their ids."""
        start = len(self.length)
        for length in lengths:
            self.prompt.append(prompt)
            self.length.append(length)
            self.target.append(length)
            self.group.append(group)
            self.tokens.append(0)
            self.finish_s.append(math.nan)
        return range(start, len(self.length))


class Costs:
    """An engine's step table by number of attempts, and its limits."""

    def __init__(self, engine: EngineModel) -> None:
        self.engine = engine
        self.limit = min(engine.running_limit or _MOST_RUNNING, _MOST_RUNNING)
        self.gain = engine.tokens_per_step
        draft_s = engine.speculation.draft_s if engine.speculation is not None else 0.0
        rows = [engine.decode.coefficients(b) for b in range(self.limit + 1)]
        self.base_s = [base + draft_s for base, _ in rows]
        self.context_s = [kappa for _, kappa in rows]
        self.capacity = (
            math.inf if engine.kv_capacity_tokens is None else engine.kv_capacity_tokens
        )
        # on average the last block of an attempt is half full
        self.each = engine.kv_tokens_per_attempt + (engine.block_tokens - 1) / 2

    def steps_s(self, active: int, context: float, steps: float) -> float:
        """Returns the seconds of `steps` steps."""
        kappa = self.context_s[active]
        grown = active * self.gain * steps * (steps - 1) / 2
        return steps * (self.base_s[active] + kappa * context) + kappa * grown

    def steps_within(self, active: int, context: float, seconds: float) -> float:
        """Returns how many steps (a real number) take `seconds`: the quadratic's root."""
        kappa = self.context_s[active]
        square = kappa * active * self.gain / 2
        linear = self.base_s[active] + kappa * context - square
        root = math.sqrt(max(0.0, linear * linear + 4 * square * seconds))
        return 2 * seconds / (linear + root) if linear + root > 0 else math.inf
