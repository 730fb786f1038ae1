"""Is a model on a GPU with a framework covered: by which curves and stacks, tested on what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Final

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.planner.support_answer import (
    Count,
    Curve,
    Gpu,
    Stack,
    Support,
    Tested,
    Verdict,
)
from flopwright.planner.support_plan import Judge, executor_runs, target_states
from flopwright.simulator.accuracy.fit_stacks import interval80, shipped_levels
from flopwright.simulator.accuracy.gpu_names import canonical_gpu
from flopwright.simulator.accuracy.published_files import load_published
from flopwright.simulator.accuracy.run_of_row import PublishedRun
from flopwright.simulator.calibration.files import SHIPPED, default_calibration
from flopwright.simulator.calibration.model import EfficiencyCurve
from flopwright.spec.load import GPU_CATALOG, MODEL_CATALOG, catalog_names, load_gpu, load_model
from flopwright.spec.model import ModelSpec

_NEEDED: Final = ("gemm", "attention", "memory_bound")
# How the source of a prior begins that takes another GPU's curves (scripts/fit_operators.py).
_BORROWED: Final = "no tables"
# Labels of the fitted stacks that name no framework.
_UNSEEN: Final = "unseen"


def support(
    judge: Judge,
    model: str | None = None,
    gpu: str | None = None,
    framework: str | None = None,
) -> Support:
    """Returns what covers a model, a GPU and a framework; None of one asks about any.

    Args:
        judge: what the executor refuses of a plan.
        model: catalog name or file. gpu: catalog name or a usual spelling ("H100 SXM5").
        framework: a family of fitted stacks or an export target ("megatron").

    Raises:
        InputError: unknown names, all of them, each with the nearest known one.
    """
    stacks = _stacks()
    spec, gpu_name, family = _resolved(model, gpu, framework, stacks)
    runs = _published()
    hits = {
        f"model {model}": None if spec is None else [_same_model(r, spec) for r in runs],
        f"GPU {gpu_name}": None if gpu_name is None else [r.gpu == gpu_name for r in runs],
        f"framework {family}": None
        if family is None
        else [r.stack.framework == family for r in runs],
    }
    asked = {name: marks for name, marks in hits.items() if marks is not None}
    shared = [run for i, run in enumerate(runs) if all(m[i] for m in asked.values())]
    own_stacks = tuple(s for s in stacks if _applies(s.name, family, spec))
    priced = None if gpu_name is None else _gpu(gpu_name, spec)
    verdict = _verdict(bool(asked), shared, priced, family, own_stacks)
    return Support(
        verdict=verdict,
        answer=_answer(verdict, asked, shared, priced, own_stacks),
        model=None if spec is None else spec.name,
        gpu=priced,
        framework=family,
        stacks=own_stacks,
        targets=target_states(spec, gpu_name),
        executor=executor_runs(spec, gpu_name, judge),
        by_part=tuple(Count(name=n, runs=sum(m)) for n, m in asked.items()),
        tested=tuple(_tested(r) for r in shared) if asked else (),
        models=_counts((r.model_name for r in runs), ()),
        gpus=_counts((r.gpu for r in runs), catalog_names(GPU_CATALOG)),
        frameworks=_counts((r.stack.framework for r in runs), _families(stacks)),
    )


@cache
def _published() -> tuple[PublishedRun, ...]:
    """Returns the published runs; their files are read once."""
    return load_published().runs


def _resolved(
    model: str | None,
    gpu: str | None,
    framework: str | None,
    stacks: tuple[Stack, ...],
) -> tuple[ModelSpec | None, str | None, str | None]:
    """Returns the three by their own names; raises InputError with every unknown one."""
    found: list[Violation] = []
    spec, gpu_name, family = None, None, None
    if model is not None:
        try:
            spec = load_model(model)
        except InputError as error:
            found.extend(error.violations)
            if not model.endswith((".yaml", ".yml")):
                found[-1:] = [_unknown("--model", model, catalog_names(MODEL_CATALOG))]
    if gpu is not None:
        names = catalog_names(GPU_CATALOG)
        gpu_name = gpu if gpu in names else canonical_gpu(gpu)
        if gpu_name not in names:
            found.append(_unknown("--gpu", gpu, names))
    if framework is not None:
        known = _families(stacks)
        family = re.sub(r"[^a-z0-9]+", "_", framework.lower()).strip("_")
        if family not in known:
            found.append(_unknown("--framework", framework, known))
    if found:
        raise InputError(found)
    return spec, gpu_name, family


def _unknown(field: str, value: str, known: Iterable[str]) -> Violation:
    rule, fix = "is not known", did_you_mean(value, known)
    return Violation(field=field, value=value, rule=rule, nearest_fix=fix)


def _same_model(run: PublishedRun, spec: ModelSpec) -> bool:
    """Returns whether a run trained a model of these sizes (names and vocabularies differ)."""

    def sizes(m: ModelSpec) -> tuple[object, ...]:
        moe = None if m.moe is None else (m.moe.num_experts, m.moe.top_k)
        heads = m.attention.num_heads
        return m.num_layers, m.hidden_size, heads, m.mlp.intermediate_size, moe

    return sizes(run.scenario.model) == sizes(spec)


def _gpu(name: str, spec: ModelSpec | None) -> Gpu:
    gpu = load_gpu(name)
    prior = default_calibration(gpu)
    needed = [*_NEEDED, *(["grouped_gemm"] if spec is not None and spec.moe is not None else [])]
    have = {c.kind for c in prior.curves}
    return Gpu(
        name=name,
        calibration=prior.id,
        source=prior.source,
        own=(SHIPPED / f"{name}.yaml").is_file() and not prior.source.startswith(_BORROWED),
        factor80=_spread80(prior.step_residual_log),
        curves=tuple(_curve(c) for c in prior.curves),
        missing=tuple(kind for kind in needed if kind not in have),
    )


def _spread80(log_std: float) -> float:
    """Returns the factor either way of the 80 % interval of such a scatter."""
    return interval80(1.0, log_std)[1]


def _curve(c: EfficiencyCurve) -> Curve:
    return Curve(
        kind=c.kind,
        dtype=c.dtype,
        phase=c.phase,
        points=c.points,
        held_out_median=c.held_out.get("median"),
    )


def _stacks() -> tuple[Stack, ...]:
    spread = shipped_levels().spread_log
    return tuple(
        Stack(name=name, spread80=_spread80(value))
        for name, value in sorted(spread.items())
        if name != _UNSEEN
    )


def _framework_of(stack: str) -> str:
    return stack.split("-", 1)[0]


def _applies(stack: str, family: str | None, spec: ModelSpec | None) -> bool:
    """Returns whether a stack is the framework's, and of the model's kind (dense or MoE)."""
    kind = None if spec is None else "dense" if spec.moe is None else "moe"
    return family in (None, _framework_of(stack)) and (kind is None or kind in stack.split("-"))


def _families(stacks: tuple[Stack, ...]) -> list[str]:
    return sorted({_framework_of(s.name) for s in stacks})


def _verdict(
    asked: bool,
    shared: list[PublishedRun],
    gpu: Gpu | None,
    family: str | None,
    stacks: tuple[Stack, ...],
) -> Verdict:
    if asked and shared:
        return "tested"
    priced = gpu is None or (gpu.own and not gpu.missing)
    return "covered" if priced and (family is None or stacks) else "assumed"


def _answer(
    verdict: Verdict,
    asked: dict[str, list[bool]],
    shared: list[PublishedRun],
    gpu: Gpu | None,
    stacks: tuple[Stack, ...],
) -> str:
    if not asked:
        return f"{len(stacks)} software stacks fitted; ask about a model, a GPU or a framework"
    what = ", ".join(asked)
    if verdict == "tested":
        return f"tested: {len(shared)} published runs share {what}"
    if verdict == "covered":
        return (
            f"covered, not tested: no published run shares {what}; the parts have their own fits"
        )
    lacks = []
    if gpu is not None and not gpu.own:
        lacks.append(f"{gpu.name} has no measured curves of its own ({gpu.source})")
    if gpu is not None and gpu.own and gpu.missing:
        lacks.append(f"no curve of {', '.join(gpu.missing)}")
    if not stacks:
        lacks.append("the framework has no fitted stack for such models")
    return f"assumed: {'; '.join(lacks)}"


def _tested(run: PublishedRun) -> Tested:
    return Tested(
        id=run.id,
        model=run.model_name,
        gpu=run.gpu,
        gpus=run.num_gpus,
        framework=run.stack.label(),
        url=run.where,
    )


def _counts(names: Iterable[str], known: Iterable[str]) -> tuple[Count, ...]:
    found = Counter(dict.fromkeys(known, 0))
    found.update(names)
    rows = sorted(found.items(), key=lambda row: (-row[1], row[0]))
    return tuple(Count(name=name, runs=runs) for name, runs in rows)
