"""Samples of an engine's log: how many sequences ran, how fast tokens came, how full the cache.

Two formats are read. vLLM: "Engine 000: Avg prompt throughput: 12.3 tokens/s, Avg generation
throughput: 456.7 tokens/s, Running: 8 reqs, Waiting: 0 reqs, GPU KV cache usage: 3.1%". SGLang:
"Decode batch. #running-req: 32, #token: 12345, token usage: 0.11, ..., gen throughput
(token/s): 987.6, #queue-req: 0".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

_NUMBER: Final = r"(\d+(?:\.\d+)?)"
_VLLM: Final = re.compile(
    rf"Avg prompt throughput: {_NUMBER} tokens/s,? "
    rf"Avg generation throughput: {_NUMBER} tokens/s,? "
    rf"Running: {_NUMBER} reqs.*?GPU KV cache usage: {_NUMBER}\s?%"
)
_SGLANG: Final = re.compile(
    rf"Decode batch.*?#running-req: {_NUMBER}, #(?:full )?token: {_NUMBER}.*?"
    rf"gen throughput \(token/s\): {_NUMBER}"
)


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One line of a log.

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


def read_log(text: str, capacity_tokens: int = 0) -> list[EngineSample]:
    """Returns the samples of a log in which sequences decoded; other lines are passed over.

    Args:
        capacity_tokens: tokens of the cache, which vLLM's usage is a share of.

    A line whose rates are no numbers, or that says nothing ran, is no sample.
    """
    found = []
    for line in text.splitlines():
        sample = _sample(line, capacity_tokens)
        if sample is not None and sample.running > 0 and sample.tokens_per_s > 0:
            found.append(sample)
    return [s for s in found if math.isfinite(s.step_s)]


def _sample(line: str, capacity_tokens: int) -> EngineSample | None:
    match = _VLLM.search(line)
    if match:
        prompt, made, running, share = (float(x) for x in match.groups())
        return EngineSample(running, share / 100 * capacity_tokens, made, prompt)
    match = _SGLANG.search(line)
    if match:
        running, tokens, made = (float(x) for x in match.groups())
        return EngineSample(running, tokens, made)
    return None
