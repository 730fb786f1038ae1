"""Records of runs beside training steps: rollout rounds, stages, and an inference engine's log."""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from flopwright.report.metrics import Fingerprint, StageMetrics
from flopwright.spec.base import Spec

# Machine of a measurement whose log says nothing of it.
FOREIGN: Final = "not recorded"
# Phases of a round that every source is brought to.
ROUND_PHASES: Final = ("generation", "reward", "log_probs", "update", "weight_sync", "other")


class RoundSample(Spec):
    """One measured round of reinforcement learning.

    Attributes:
        time_s: seconds by phase of ROUND_PHASES; round_time_s is the whole.
        generated_tokens, prompt_tokens, completed: of the round; None where not logged.
        figures: what else the log says, under its own names.
    """

    round: NonNegativeInt
    round_time_s: NonNegativeFloat
    time_s: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    generated_tokens: NonNegativeFloat | None = None
    prompt_tokens: NonNegativeFloat | None = None
    completed: NonNegativeFloat | None = None
    tokens_per_s: NonNegativeFloat | None = None
    figures: dict[str, float] = Field(default_factory=dict)


class EngineLine(Spec):
    """One line of an inference engine's log.

    Attributes:
        time_s: seconds since the first line; None without a time stamp.
        phase: "decode" or "prefill" (SGLang), "mixed" of a periodic summary (vLLM).
        running, waiting: requests.
        generated_tokens_per_s, prompt_tokens_per_s: as the engine prints them.
        context_tokens: in the cache; kv_usage: share of the cache (0 to 1).
        new_tokens, cached_tokens: of a prefill.
        line: number in the file.
    """

    time_s: float | None = None
    phase: Literal["decode", "prefill", "mixed"]
    running: NonNegativeInt
    waiting: NonNegativeInt
    generated_tokens_per_s: NonNegativeFloat | None = None
    prompt_tokens_per_s: NonNegativeFloat | None = None
    context_tokens: NonNegativeInt | None = None
    kv_usage: NonNegativeFloat | None = None
    new_tokens: NonNegativeInt | None = None
    cached_tokens: NonNegativeInt | None = None
    cuda_graph: bool | None = None
    prefix_hit_rate: NonNegativeFloat | None = None
    accept_length: NonNegativeFloat | None = None
    line: NonNegativeInt = 0


class _Record(Spec):
    id: str
    created: str
    name: str
    source: str
    fingerprint: Fingerprint | None = None


class RoundsRecord(_Record):
    """Rounds of one run, as a program's log has them."""

    kind: Literal["rounds"] = "rounds"
    gpus: NonNegativeInt | None = None
    rounds: tuple[RoundSample, ...]


class StagesRecord(_Record):
    """Stages of one campaign."""

    kind: Literal["stages"] = "stages"
    stages: tuple[StageMetrics, ...]


class EngineRecord(_Record):
    """What an inference engine logged."""

    kind: Literal["engine"] = "engine"
    lines: tuple[EngineLine, ...]


Record = RoundsRecord | StagesRecord | EngineRecord
AnyRecord = Annotated[Record, Field(discriminator="kind")]


_R = TypeVar("_R", RoundsRecord, StagesRecord, EngineRecord)


def with_own_id(record: _R) -> _R:
    """Returns the record under the id of its content: read twice it is stored once."""
    data = record.model_copy(update={"id": "", "created": ""}).model_dump_json()
    return record.model_copy(update={"id": hashlib.sha256(data.encode()).hexdigest()[:16]})
