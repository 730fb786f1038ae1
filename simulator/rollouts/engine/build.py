"""The engine model of a served model on its GPUs: what the round simulator runs on."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.ops import Array
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.rollouts.engine.cache import memory, token_bytes
from flopwright.simulator.rollouts.engine.price import Served, pass_seconds
from flopwright.simulator.rollouts.engine.rows import load
from flopwright.simulator.rollouts.engine.software import engine_software
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.rollouts.engine import (
    EngineModel,
    HostPool,
    PrefillTable,
    Speculation,
    StepTable,
)
from flopwright.spec.rollouts.engine_served import EngineShape, EngineSoftware, ServedModel
from flopwright.units import show_bytes

# Contexts between which the slope of a step in its context is taken: beyond any window.
_CONTEXTS: Final = (4096.0, 32768.0)
_BATCHES: Final = (
    1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
    4096, 8192,
)  # fmt: skip


def engine_model(
    model: ServedModel,
    cluster: ClusterSpec,
    shape: EngineShape,
    *,
    software: EngineSoftware | str = "vllm",
    speculation: Speculation | None = None,
    prefix_cache: bool = True,
    host_pool: HostPool | None = None,
    max_running: int | None = None,
    calibration: Calibration | None = None,
) -> EngineModel:
    """Returns one instance as an engine model, priced from operators and links.

    Args:
        cluster: where it runs; the instance takes shape.gpus of its GPUs.
        software: the engine, by name or as a record.
        max_running: attempts of the whole instance at most; None: as the engine's default.
        calibration: measured curves of the user's own.

    Raises:
        InputError: the weights do not fit, or the cluster is too small.
    """
    engine = engine_software(software) if isinstance(software, str) else software
    on = Served(
        model=model, cluster=cluster, shape=shape, software=engine, calibration=calibration
    )
    held = memory(on)
    capacity = held.tokens() // engine.block_tokens * engine.block_tokens
    _check(on, capacity)
    limit = max_running or engine.max_running * shape.dp
    per_attempt = math.ceil(held.sequence_bytes / held.token_bytes) if held.token_bytes else 0
    return EngineModel(
        name=f"{model.name} on {shape.gpus} x {cluster.node.gpu.name}, {engine.name}",
        decode=step_table(on, limit, speculation),
        prefill=prefill_table(on),
        kv_capacity_tokens=capacity * shape.dp,
        block_tokens=engine.block_tokens,
        kv_tokens_per_attempt=per_attempt,
        kv_bytes_per_token=token_bytes(model, shape.tp) * shape.tp,
        max_running=limit,
        speculation=speculation,
        preemption="recompute",
        chunk_tokens=engine.max_step_tokens * shape.dp,
        prefix_cache=prefix_cache,
        host_pool=host_pool,
        gpus=shape.gpus,
        ranks=shape.dp,
        sources={**engine.sources, "curves": on.curves.source},
    )


def _check(on: Served, capacity: int) -> None:
    held, gpu = memory(on), on.cluster.node.gpu
    found = []
    if on.shape.gpus > on.cluster.num_gpus:
        found.append(
            Violation(
                field="shape",
                value=f"tp {on.shape.tp} x dp {on.shape.dp}",
                rule=f"needs {on.shape.gpus} GPUs, the cluster has {on.cluster.num_gpus}",
            )
        )
    if capacity <= 0:
        need = held.weight_bytes + held.workspace_bytes
        found.append(
            Violation(
                field="memory",
                value=show_bytes(need),
                rule=f"weights and workspace of a GPU leave no cache on {gpu.name} "
                f"({show_bytes(gpu.hbm_bytes)})",
                nearest_fix="more GPUs an instance (tp, ep), or a narrower weight format",
            )
        )
    if found:
        raise InputError(found)


def batches_up_to(limit: int) -> tuple[int, ...]:
    """Returns batches at which a table has entries: fine where steps are short."""
    return (*(b for b in _BATCHES if b < limit), limit)


def step_table(on: Served, limit: int, speculation: Speculation | None = None) -> StepTable:
    """Returns the seconds of a decode step by attempts of the instance, up to `limit`.

    With captured graphs an entry is a captured batch; else the table interpolates. The cost
    of verifying drafts is in it, that of making them too.
    """
    dp, captured = on.shape.dp, on.software.graph_batches
    each = max(math.ceil(limit / dp), 1)
    graphs = tuple(b for b in captured if b < each)
    batches = (*graphs, each) if captured else batches_up_to(each)
    step_tokens = 1.0 if speculation is None else 1.0 + speculation.drafts
    base, slope = step_coefficients(on, np.asarray(batches, float), step_tokens)
    if speculation is not None:
        base = base + speculation.draft_s
    one = len(batches) == 1
    return StepTable(
        batch=(1, 2) if one and not captured else tuple(b * dp for b in batches),
        base_s=tuple(base) * (2 if one and not captured else 1),
        per_context_token_s=tuple(slope) * (2 if one and not captured else 1),
        interpolate=not captured,
    )


def step_coefficients(
    on: Served, batches: Array, step_tokens: float = 1.0, prompt: tuple[float, float] = (0.0, 0.0)
) -> tuple[Array, Array]:
    """Returns (seconds without context, seconds a context token of the instance) by batch.

    Args:
        batches: attempts of a tp group.
        step_tokens: tokens an attempt runs through the model in a step.
        prompt: (prompts, tokens of each) that a tp group prefills in the same step.
    """
    count, tokens = prompt
    near, far = (
        pass_seconds(
            on,
            load(
                batches, batches * context, step_tokens=step_tokens, prompts=count,
                prompt_tokens=count * tokens, prompt_pairs=count * tokens**2 / 2,
            ),
        ).seconds
        for context in _CONTEXTS
    )  # fmt: skip
    step = np.where(batches > 0, batches * (_CONTEXTS[1] - _CONTEXTS[0]), 1.0)
    slope = np.where(batches > 0, (far - near) / step, 0.0)
    base = near - slope * batches * _CONTEXTS[0]
    return np.maximum(base, 0.0), np.maximum(slope, 0.0) / on.shape.dp


def prefill_table(on: Served, tokens: float | None = None) -> PrefillTable:
    """Returns the seconds of a prefill alone: fixed, a token, and a pair of tokens.

    The slope in tokens is taken between an eighth of and a full step of the engine, all of the
    instance's groups prefilling alike; pairs are priced at a long prefix.
    """
    full = float(tokens or on.software.max_step_tokens)
    sizes = np.array([full / 8, full])
    seconds = pass_seconds(on, load(0.0, 0.0, prompts=1.0, prompt_tokens=sizes)).seconds
    per_token = float((seconds[1] - seconds[0]) / (sizes[1] - sizes[0]))
    fixed = max(float(seconds[0]) - per_token * float(sizes[0]), 0.0)
    pairs = np.array([full**2 / 2, full * 65_536.0])
    at = pass_seconds(on, load(0.0, 0.0, prompts=1.0, prompt_tokens=full, prompt_pairs=pairs))
    per_pair = float((at.seconds[1] - at.seconds[0]) / (pairs[1] - pairs[0]))
    dp = on.shape.dp
    return PrefillTable(
        fixed_s=fixed, per_token_s=max(per_token, 0.0) / dp, per_pair_s=max(per_pair, 0.0) / dp
    )
