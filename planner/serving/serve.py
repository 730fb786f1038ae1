"""What serving a model costs: GPUs, tokens a second of a GPU and a user, money by effort."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.planner.serving.holds import (
    MAX_GPUS,
    Holding,
    fewest_for_weights,
    fewest_gpus,
)
from flopwright.simulator.hardware.nodes.types import node_type as node_type_of
from flopwright.simulator.rollouts.engine.build import prefill_table
from flopwright.simulator.rollouts.engine.price import pass_seconds
from flopwright.simulator.rollouts.engine.rows import load
from flopwright.simulator.rollouts.engine.software import engine_software
from flopwright.simulator.rollouts.engine.weights import model_bytes
from flopwright.spec.rollouts.engine import Speculation
from flopwright.spec.rollouts.engine_served import EngineSoftware, ServedModel
from flopwright.units import plural

# Output tokens of a task by effort, assumed: nobody publishes them.
EFFORTS: Final = {"low": 2_000, "high": 16_000, "max": 64_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be served.

    Attributes:
        context: tokens of each sequence the cache must hold; concurrency: sequences at once.
        prompt_tokens: of a task; efforts: output tokens of a task by level.
        usd_per_gpu_hour: None takes the node type's list price, where it has one.
        models: how many models of this size are kept loaded (experts behind a router).
    """

    node_type: str
    engine: str = "vllm"
    context: int = 131_072
    concurrency: int = 1
    prompt_tokens: int = 4_000
    efforts: dict[str, int] = field(default_factory=lambda: dict(EFFORTS))
    usd_per_gpu_hour: float | None = None
    speculation: Speculation | None = None
    models: int = 1
    max_gpus: int = MAX_GPUS


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The answer for one model, or for several alike behind a router.

    Attributes:
        weight_bytes: of all models; gpus_for_weights: GPUs that hold those alone.
        gpus: of all models, each with its cache; 0 where none of the counts holds it.
        tokens_per_s_per_user: at the asked concurrency, which is shared among the models.
        usd_per_million_tokens, usd_per_task: output tokens, prompts of tasks included in the
            latter; empty or None without a price.
    """

    model: str
    gpu: str
    models: int
    weight_bytes: int
    gpus_for_weights: int
    gpus: int
    layout: str
    cache_bytes_per_gpu: float
    sequences: int
    tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    prefill_tokens_per_s_per_gpu: float
    usd_per_million_tokens: float | None
    seconds_per_task: dict[str, float]
    usd_per_task: dict[str, float]
    assumptions: tuple[str, ...]

    def to_data(self) -> dict[str, Any]:
        """Returns the record as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Rates:
    holding: Holding
    step_s: float
    per_user: float
    per_gpu: float


def _rates(held: Holding, asked: Asked, users: int) -> _Rates:
    """Seconds of a step with the asked users at half their context, and what it gives."""
    on = held.on
    each = np.array([max(users / (on.shape.dp * held.replicas), 1.0)])
    verified = 1.0 if asked.speculation is None else 1.0 + asked.speculation.drafts
    found = load(each, each * asked.context / 2, step_tokens=verified)
    step = float(pass_seconds(on, found).seconds[0])
    gained = 1.0
    if asked.speculation is not None:
        step, gained = step + asked.speculation.draft_s, asked.speculation.tokens_per_step
    return _Rates(held, step, gained / step, users * gained / step / held.gpus)


def serve(model: ServedModel, asked: Asked) -> Serving:
    """Returns what it takes to serve a model; gpus is 0 where no count looked at holds it.

    Of the layouts on the fewest GPUs that hold it the one with the most tokens a second is
    taken. Sequences are priced at half the asked context, their mean while they grow.

    Raises:
        InputError: a node type or engine that there is not, or numbers below one.
    """
    _check(asked)
    kind, engine = node_type_of(asked.node_type), engine_software(asked.engine)
    gpu = kind.node.gpu
    users = max(-(-asked.concurrency // asked.models), 1)
    options = fewest_gpus(model, asked.node_type, engine, asked.context, users, asked.max_gpus)
    price = asked.usd_per_gpu_hour if asked.usd_per_gpu_hour else kind.price_usd_per_gpu_h
    best = max((_rates(h, asked, users) for h in options), key=lambda r: r.per_gpu, default=None)
    notes = (f"weights: {model.weights_text()}", *_notes(asked, engine, price))
    weights = model_bytes(model) * asked.models
    alone = fewest_for_weights(model, gpu) * asked.models
    if best is None:
        return Serving(
            model=model.name, gpu=gpu.name, models=asked.models, weight_bytes=weights,
            gpus_for_weights=alone, gpus=0, layout="", cache_bytes_per_gpu=0.0, sequences=0,
            tokens_per_s_per_gpu=0.0, tokens_per_s_per_user=0.0,
            prefill_tokens_per_s_per_gpu=0.0, usd_per_million_tokens=None, seconds_per_task={},
            usd_per_task={}, assumptions=notes,
        )  # fmt: skip
    held, shape = best.holding, best.holding.on.shape
    prompt = prefill_table(held.on)
    seconds = {
        level: prompt.seconds(asked.prompt_tokens) + tokens / best.per_user
        for level, tokens in asked.efforts.items()
    }
    gpu_s = {
        level: prompt.work_seconds(asked.prompt_tokens) * shape.gpus + tokens / best.per_gpu
        for level, tokens in asked.efforts.items()
    }
    usd_s = None if price is None else price / 3600
    return Serving(
        model=model.name,
        gpu=gpu.name,
        models=asked.models,
        weight_bytes=weights,
        gpus_for_weights=alone,
        gpus=held.gpus * asked.models,
        layout=f"tp {shape.tp}, dp {shape.dp}, ep {shape.ep}, {plural(held.replicas, 'instance')}",
        cache_bytes_per_gpu=held.memory.cache_bytes,
        sequences=held.sequences * held.replicas * asked.models,
        tokens_per_s_per_gpu=best.per_gpu,
        tokens_per_s_per_user=best.per_user,
        prefill_tokens_per_s_per_gpu=1 / (prompt.per_token_s * shape.gpus),
        usd_per_million_tokens=None if usd_s is None else usd_s * 1e6 / best.per_gpu,
        seconds_per_task=seconds,
        usd_per_task={} if usd_s is None else {k: usd_s * v for k, v in gpu_s.items()},
        assumptions=notes,
    )


def _check(asked: Asked) -> None:
    found = [
        Violation(field=name, value=str(value), rule="must be at least 1")
        for name, value in (
            ("context", asked.context),
            ("concurrency", asked.concurrency),
            ("models", asked.models),
            ("prompt_tokens", asked.prompt_tokens),
        )
        if value < 1
    ]
    if found:
        raise InputError(found)


def _notes(asked: Asked, engine: EngineSoftware, price: float | None) -> tuple[str, ...]:
    notes = [f"{field}: {why}" for field, why in engine.sources.items() if "assumed" in why]
    if asked.efforts == EFFORTS:
        notes.append("output tokens of a task by effort: assumed")
    if price is None:
        notes.append("no price is known for this node type: give one")
    return tuple(notes)
