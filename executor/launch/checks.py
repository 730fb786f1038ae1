"""Whether these plans can run here, asked before anything starts or is written."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from flopwright.errors import InputError, Violation
from flopwright.executor.data.domains import chosen_weights, is_mixture, load_mixtures
from flopwright.executor.launch.machine import Machine
from flopwright.executor.launch.request import (
    COLLECTIVE_TIMEOUT_S,
    REQUEST_FILE,
    ROUNDS_FILE,
    STEPS_FILE,
    RunEntry,
    RunRequest,
    SinkName,
    checkpoint_dir,
    measurement_file,
)
from flopwright.executor.launch.supported import unsupported
from flopwright.models.hf.config_out import hf_config
from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import plan_violations
from flopwright.spec.load import load_model, load_plan

_NEEDED_PACKAGES: Final = ("torch", "deepspeed", "tokenizers", "safetensors")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What the user may say about a run besides its plans.

    Attributes:
        steps: None runs the workload to its token budget.
        nproc: ranks to start; None takes the plan's, if this machine has that many
            processors. On CPUs a larger number shares the cores.
        model: a model file or catalog name that the plans must be for.
        names: names of the results, one a plan; empty takes the plans' own, made unique.
        stream: read the text while the run goes on.
        prefetch: see `RunRequest`; None takes 2 for a streamed text and 0 for another.
        seed: of weights and data order; None takes the workload's.
        collective_timeout_s: how long a rank waits for others before it ends the run.
        log_to: where figures go besides the JSONL files.
        kineto_trace: write a Kineto trace of one step of each plan.
        start_from: a step folder of a checkpoint whose weights and optimizer state are begun
            with.
        resume: go on with the run in the folder; where it has no checkpoint, begin it again.
        checkpoint_every, keep_checkpoints, max_rollbacks, deterministic, export_hf: see
            `RunRequest`.
        checkpoints: write each plan's weights at the end.
        silence_s: end the run when it has shown no progress for so long; None waits.
    """

    steps: int | None = None
    steps_per_round: int = 4
    nproc: int | None = None
    text: Path | None = None
    tokenizer: Literal["bpe", "characters"] = "bpe"
    stream: bool = False
    prefetch: int | None = None
    model: str | None = None
    names: tuple[str, ...] = ()
    seed: int | None = None
    allow_mismatch: bool = False
    probe: bool = False
    probe_budget_s: float = 45.0
    held_out_sequences: int = 64
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S
    log_to: tuple[SinkName, ...] = ()
    kineto_trace: bool = False
    checkpoints: bool = True
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    max_rollbacks: int = 0
    resume: bool = False
    start_from: Path | None = None
    deterministic: bool = False
    export_hf: bool = False
    silence_s: float | None = None


def check_request(
    plan_paths: Sequence[Path | PlanFile],
    out_dir: Path | None,
    options: LaunchOptions,
    machine: Machine,
) -> RunRequest:
    """Returns the request for a launch that can start.

    Args:
        plan_paths: plan files (or plans), all for the same number of ranks, model and workload.
        out_dir: the run's folder, new or empty; None where others write to it already.
        options: what the user said.
        machine: what was found.

    Raises:
        InputError: everything that stands against it, at once.
    """
    if not plan_paths:
        raise InputError("no plan was given")
    plans = [p if isinstance(p, PlanFile) else load_plan(p) for p in plan_paths]
    mismatch = _device_mismatch(plans, machine)
    found = [] if options.allow_mismatch else list(mismatch)
    for path, plan in zip(plan_paths, plans, strict=True):
        rules = _plan_rules(plan, options, machine)
        found += rules if isinstance(path, PlanFile) else _with_file(rules, path)
    found += _together(plans)
    found += _names_rule(options.names, len(plans))
    found += _folder_rules(out_dir, resume=options.resume) if out_dir is not None else []
    found += _software_rules()
    found += _sink_rules(options.log_to)
    found += _rollback_rules(options, len(plans))
    found += _mixture_rules(plans, options.text)
    if options.text is not None and not options.text.exists():
        found.append(
            Violation(field="--text", value=str(options.text), rule="no such file or folder")
        )
    if found:
        raise InputError(found)
    return _request(plans, options, machine, tuple(str(v) for v in mismatch))


def _rollback_rules(options: LaunchOptions, num_plans: int) -> list[Violation]:
    """Returns what a run that may go back to before a loss spike lacks."""
    field, value = "--max-rollbacks", str(options.max_rollbacks)
    if options.max_rollbacks and num_plans > 1:
        rule = "plans that take turns cannot go back by themselves"
        return [Violation(field=field, value=value, rule=rule, nearest_fix="run one plan")]
    if options.max_rollbacks and options.checkpoint_every is None:
        rule, fix = "there is nothing to go back to", "add --checkpoint-every STEPS"
        return [Violation(field=field, value=value, rule=rule, nearest_fix=fix)]
    return []


def _mixture_rules(plans: Sequence[PlanFile], text: Path | None) -> list[Violation]:
    """Returns what stands against the mixtures that the plans name, and the text's own."""
    found: list[Violation] = []
    for plan in plans[:1]:
        mixture = plan.scenario.workload.mixture
        if text is not None and text.is_file() and is_mixture(text):
            try:
                chosen_weights(load_mixtures(text), mixture, text)
            except InputError as error:
                found += error.violations
        elif mixture is not None:
            rule = "only a file of domains and mixtures can have it (docs/data.md)"
            found.append(Violation(field="workload.mixture", value=mixture, rule=rule,
                                   nearest_fix="pass --text domains.yaml"))  # fmt: skip
    return found


def _sink_rules(names: Iterable[SinkName]) -> list[Violation]:
    """Returns the sinks whose package, of the same name, is not there."""
    return [
        Violation(
            field="--log-to",
            value=name,
            rule=f"the package {name} is not installed",
            nearest_fix=f"pip install {name}",
        )
        for name in names
        if importlib.util.find_spec(name) is None
    ]


def _request(
    plans: Sequence[PlanFile], options: LaunchOptions, machine: Machine, mismatch: tuple[str, ...]
) -> RunRequest:
    scenario = plans[0].scenario
    wants_gpu = machine.gpus > 0 and scenario.cluster.node.gpu.kind != "cpu"
    return RunRequest(
        entries=tuple(
            RunEntry(name=name, plan=plan)
            for name, plan in zip(entry_names(plans, options.names), plans, strict=True)
        ),
        device="cuda" if wants_gpu else "cpu",
        steps=options.steps or scenario.workload.num_steps,
        steps_per_round=options.steps_per_round,
        seed=scenario.workload.seed if options.seed is None else options.seed,
        text=None if options.text is None else str(options.text.resolve()),
        tokenizer=options.tokenizer,
        stream=options.stream,
        prefetch=(2 if options.stream else 0) if options.prefetch is None else options.prefetch,
        probe=options.probe,
        probe_budget_s=options.probe_budget_s,
        held_out_sequences=options.held_out_sequences,
        checkpoints=options.checkpoints,
        checkpoint_every=options.checkpoint_every,
        keep_checkpoints=options.keep_checkpoints,
        max_rollbacks=options.max_rollbacks,
        deterministic=options.deterministic,
        export_hf=options.export_hf,
        start_from=None if options.start_from is None else str(options.start_from.resolve()),
        mismatch=mismatch,
        collective_timeout_s=options.collective_timeout_s,
        log_to=options.log_to,
        kineto_trace=options.kineto_trace,
    )


def entry_names(plans: Sequence[PlanFile], given: Sequence[str]) -> tuple[str, ...]:
    """Returns one name a plan: the given ones, or the plans' own, made unique by a number."""
    if given:
        return tuple(given)
    names: list[str] = []
    for plan in plans:
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", plan.name).strip("-.") or "plan"
        name, number = base, 2
        while name in names:
            name, number = f"{base}-{number}", number + 1
        names.append(name)
    return tuple(names)


def _with_file(violations: Iterable[Violation], path: Path) -> list[Violation]:
    return [
        Violation(
            rule=v.rule,
            field=v.field,
            value=v.value,
            limit=v.limit,
            nearest_fix=v.nearest_fix,
            file=str(path),
        )
        for v in violations
    ]


def _plan_rules(plan: PlanFile, options: LaunchOptions, machine: Machine) -> list[Violation]:
    found = list(plan_violations(plan.parallel, plan.scenario))
    found += unsupported(plan)
    found += _export_rules(plan) if options.export_hf else []
    found += _world_size_rules(plan.parallel.world_size, options.nproc, machine)
    if options.model is not None:
        model = load_model(options.model)
        if model.content_hash() != plan.model_hash:
            found.append(
                Violation(
                    field="model_hash",
                    value=plan.model_hash,
                    rule=f"the plan is for '{plan.scenario.model.name}', not for "
                    f"{options.model} ({model.content_hash()})",
                    nearest_fix="make a plan for this model",
                )
            )
    return found


def _export_rules(plan: PlanFile) -> list[Violation]:
    """Returns why a plan's weights could not be written as Hugging Face has them."""
    try:
        hf_config(plan.scenario.model)
    except InputError as error:
        return [replace(v, field=f"--export-hf: {v.field}") for v in error.violations]
    return []


def machine_rules(plan: PlanFile, nproc: int | None, machine: Machine) -> list[Violation]:
    """Returns why a plan of this size and for this kind of device cannot run here."""
    sizes = _world_size_rules(plan.parallel.world_size, nproc, machine)
    return [*_device_mismatch([plan], machine), *sizes]


def _world_size_rules(world_size: int, nproc: int | None, machine: Machine) -> list[Violation]:
    available = machine.gpus or machine.cores
    if nproc is not None and nproc != world_size:
        return [
            Violation(
                field="parallel.world_size",
                value=str(world_size),
                rule=f"the plan needs {world_size} ranks and --nproc asks for {nproc}",
                nearest_fix=f"use --nproc {world_size}, or a plan for {nproc} ranks",
            )
        ]
    if world_size > available and (nproc is None or machine.gpus):
        return [
            Violation(
                field="parallel.world_size",
                value=str(world_size),
                rule=f"the plan needs {world_size} ranks; this machine has {machine.describe()}",
                limit=str(available),
                nearest_fix=f"make a plan for {available} ranks"
                + ("" if machine.gpus else f", or share the cores with --nproc {world_size}"),
            )
        ]
    return []


def _together(plans: Sequence[PlanFile]) -> list[Violation]:
    """Returns what plans of one launch must share and do not."""
    first = plans[0]
    found = []
    for plan in plans[1:]:
        for field, mine, other in (
            ("world_size", plan.parallel.world_size, first.parallel.world_size),
            ("model_hash", plan.model_hash, first.model_hash),
            (
                "workload",
                plan.scenario.workload.content_hash(),
                first.scenario.workload.content_hash(),
            ),
        ):
            if mine != other:
                found.append(
                    Violation(
                        field=field,
                        value=f"{mine} in '{plan.name}', {other} in '{first.name}'",
                        rule="plans of one launch must agree on it",
                        nearest_fix="run them in separate launches",
                    )
                )
    return found


def _device_mismatch(plans: Sequence[PlanFile], machine: Machine) -> list[Violation]:
    kinds = sorted({p.scenario.cluster.node.gpu.kind for p in plans})
    return [
        Violation(
            field="scenario.cluster.node.gpu.kind",
            value=kind,
            rule=f"the plan is for {kind} and this machine has {machine.describe()}",
            nearest_fix="pass --allow-mismatch to run it all the same; "
            "its times then say nothing about the plan's machine",
        )
        for kind in kinds
        if kind != "cpu" and kind != machine.device_kind
    ]


def _names_rule(names: Sequence[str], num_plans: int) -> list[Violation]:
    if not names:
        return []
    found = []
    if len(names) != num_plans:
        found.append(
            Violation(
                field="--name",
                value=str(len(names)),
                rule=f"one name a plan is needed, or none ({num_plans} plans)",
            )
        )
    for name in sorted(set(names)):
        if names.count(name) > 1:
            found.append(Violation(field="--name", value=name, rule="stands twice"))
        if not _NAME.fullmatch(name):
            found.append(
                Violation(
                    field="--name", value=name, rule="letters, digits, '.', '_' and '-' only"
                )
            )
    return found


def _folder_rules(out_dir: Path, *, resume: bool = False) -> list[Violation]:
    if resume and (out_dir / REQUEST_FILE).is_file():
        if os.access(out_dir, os.W_OK | os.X_OK):
            return []
        return [Violation(field="--out", value=str(out_dir), rule="cannot write to the folder")]
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        return [
            Violation(
                field="--out",
                value=str(out_dir),
                rule="exists and is not an empty folder",
                nearest_fix="choose another folder, or go on with the run in it: --resume",
            )
        ]
    parent = next(p for p in (out_dir, *out_dir.absolute().parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        return [Violation(field="--out", value=str(out_dir), rule=f"cannot write to {parent}")]
    return []


def run_folder_rules(out_dir: Path) -> list[Violation]:
    """Returns what stands against a run in a folder that may hold more, such as its logs."""
    if not out_dir.is_dir():
        return _folder_rules(out_dir)
    names = (STEPS_FILE, ROUNDS_FILE, measurement_file("*"), checkpoint_dir("*"))
    found = next((path for name in names for path in sorted(out_dir.glob(name))), None)
    if found is None:
        return []
    return [
        Violation(
            field="--out",
            value=str(out_dir),
            rule=f"the folder already holds a run ({found.name})",
            nearest_fix="go on with it (--resume), move it away, or choose another folder",
        )
    ]


def _software_rules() -> list[Violation]:
    missing = [name for name in _NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return []
    return [
        Violation(
            rule=f"running needs {', '.join(missing)}",
            nearest_fix="pip install 'flopwright[train]'",
        )
    ]
