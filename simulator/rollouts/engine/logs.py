"""Steps out of an engine's log: sequences that ran, tokens a second, how full the cache was."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from flopwright.report.records import EngineLine


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One line of a log in which sequences decoded.

    Attributes:
        running: sequences that decode; context_tokens: tokens of cache in use.
        tokens_per_s: generated tokens a second; prompt_tokens_per_s: prefilled ones.
    """

    running: float
    context_tokens: float
    tokens_per_s: float
    prompt_tokens_per_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of one decode step, one token a sequence."""
        return self.running / self.tokens_per_s


def samples_of(lines: Iterable[EngineLine], capacity_tokens: int = 0) -> list[EngineSample]:
    """Returns the lines in which sequences decoded; prefills and idle lines are passed over.

    Args:
        lines: as `flopwright.store.foreign.engines.read_engine_log` reads them.
        capacity_tokens: tokens of the cache, for engines that print the share in use only.
    """
    found = []
    for line in lines:
        made = line.generated_tokens_per_s or 0.0
        if line.phase == "prefill" or line.running == 0 or made <= 0 or not math.isfinite(made):
            continue
        context = float(line.context_tokens or 0)
        if line.context_tokens is None:
            context = (line.kv_usage or 0.0) * capacity_tokens
        found.append(EngineSample(line.running, context, made, line.prompt_tokens_per_s or 0.0))
    return found
