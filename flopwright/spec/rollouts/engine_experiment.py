"""One published measurement of an engine alone: an offline run, a decode or a prefill pool."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from flopwright.spec.base import Spec
from flopwright.spec.rollouts.engine import Speculation
from flopwright.spec.rollouts.engine_served import (
    CacheType,
    EngineShape,
    EngineSoftware,
    FormatName,
    ServedModel,
    ServedRole,
)

Tokens = Annotated[PositiveInt, Field(le=10**8)]


class OfflineCase(Spec):
    """All requests queued at once, all of one length; prefill is in the time."""

    case: Literal["offline"] = "offline"
    prompt_tokens: Tokens
    output_tokens: Tokens
    requests: Tokens


class DecodeCase(Spec):
    """A pool that only decodes, its prompts prefilled elsewhere.

    Attributes:
        attempts: sequences of each tp group; context_tokens: mean context of each.
        speculation: tokens of a step where drafts are verified.
    """

    case: Literal["decode"] = "decode"
    attempts: Tokens
    context_tokens: Tokens
    speculation: Speculation | None = None


class PrefillCase(Spec):
    """A pool that only prefills prompts of one length, in full passes."""

    case: Literal["prefill"] = "prefill"
    prompt_tokens: Tokens
    tokens_per_pass: Tokens


class EngineExperiment(Spec):
    """One instance of an engine and what it was given.

    Attributes:
        model: a served model in place, or the name of one (scenarios/serving/models) or of a
            model of the catalog, which then has `release` and `kv_dtype`.
        formats: weight formats by role, where they differ from the release's usual ones.
        node_type: kind of node (simulator/hardware/nodes); the instance takes shape.gpus.
        software: an engine by name (simulator/hardware/engines), or in place.
    """

    kind: Literal["engine"] = "engine"
    model: str | ServedModel
    release: FormatName | None = None
    kv_dtype: CacheType | None = None
    formats: dict[ServedRole, FormatName] = Field(default_factory=dict)
    node_type: str = Field(min_length=1)
    shape: EngineShape = EngineShape()
    software: str | EngineSoftware = "vllm"
    load: Annotated[OfflineCase | DecodeCase | PrefillCase, Field(discriminator="case")]

    @model_validator(mode="after")
    def _formats(self) -> Self:
        if isinstance(self.model, ServedModel) and (self.release or self.formats):
            raise ValueError("a model in place has its formats already: no release, no formats")
        return self
