"""`flopwright import-log`: another program's log or trace goes into the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flopwright.plan.file import PlanFile
    from flopwright.report.metrics import Measurement
    from flopwright.report.records import Record


class LogKind(StrEnum):
    """Whose log it is."""

    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    DEEPSPEED = "deepspeed"
    KINETO = "kineto"
    VERL = "verl"
    VLLM = "vllm"
    SGLANG = "sglang"


_LONGEST_NAME = 200
_OF_STEPS = frozenset({LogKind.MEGATRON, LogKind.TORCHTITAN, LogKind.DEEPSPEED})


def import_log(
    logs: Annotated[list[Path], typer.Argument(help="Log file; for kineto one trace a rank.")],
    kind: Annotated[
        LogKind,
        typer.Option("--as", help="megatron, torchtitan, deepspeed, kineto, verl, vllm, sglang"),
    ],
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="The plan that ran; needed for training steps and kineto."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name in the store; default: plan's, or file's.")
    ] = None,
    stack: Annotated[
        str, typer.Option("--software", help="What ran it, e.g. 'mcore-0.16 cuda-12.8'.")
    ] = "",
    discard: Annotated[
        int, typer.Option("--discard", min=0, help="First lines that are left out of the time.")
    ] = 3,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="GPUs of the run, for verl.")
    ] = None,
    store: Annotated[
        str | None, typer.Option("--store", help="Store URL or SQLite file; default: your own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read a training, rollout or inference log into the store: compare it, learn from it.

    The plan of a running job is read from its configuration by `flopwright import`.

    Example: flopwright import-log train.log --as megatron --plan plan.yaml
    """
    from flopwright.store import open_store

    found = _read(logs, kind, plan, name, stack, discard, gpus)
    kept = open_store(store)
    measurement, record = found
    # The id is that of the content: a log read again is known, whenever that was.
    if measurement is not None:
        known = bool(kept.measurements(ids=[measurement.id]))
        new, data = not known and kept.add(measurement), measurement.to_data()
    else:
        assert record is not None
        known = any(r.id == record.id for r in kept.records(kind=record.kind))
        new, data = not known and kept.add_record(record), record.to_data()
    if as_json:
        typer.echo(json.dumps({"new": new, "store": kept.url, "record": data}))
        return
    typer.echo(_summary(data) + ("" if new else " (was there already)"))
    typer.echo(f"store: {kept.url}")


def _read(
    logs: Sequence[Path],
    kind: LogKind,
    plan: Path | None,
    name: str | None,
    stack: str,
    discard: int,
    gpus: int | None,
) -> tuple[Measurement | None, Record | None]:
    """Returns the measurement, or the other record, that the logs hold."""
    from flopwright.errors import InputError, Violation

    if name is not None and not _is_name(name):
        raise InputError(
            Violation(
                field="--name",
                value=ascii(name[:40]),
                rule=f"must be printable text of 1 to {_LONGEST_NAME} characters",
                nearest_fix="leave it out: the plan's or the file's name is taken",
            )
        )
    if kind is not LogKind.KINETO and len(logs) > 1:
        raise InputError(
            Violation(field="LOGS", value=str(len(logs)), rule=f"{kind} takes one log at a time")
        )
    if kind in _OF_STEPS or kind is LogKind.KINETO:
        of = _plan(plan, kind)
        if name is not None:
            of = of.model_copy(update={"name": name})
        return _measured(logs, kind, of, stack, discard), None
    return None, _record(logs[0], kind, name or logs[0].stem, gpus)


def _is_name(name: str) -> bool:
    """Returns whether a text can name a run in tables and files (lone surrogates cannot)."""
    return bool(name.strip()) and name.isprintable() and len(name) <= _LONGEST_NAME


def _plan(path: Path | None, kind: LogKind) -> PlanFile:
    from flopwright.errors import InputError, Violation
    from flopwright.spec.load import load_plan

    if path is None:
        raise InputError(
            Violation(
                field="--plan",
                rule=f"a log of {kind} does not say what ran",
                nearest_fix="flopwright import reads a job's settings into a plan file",
            )
        )
    return load_plan(path)


def _measured(
    logs: Sequence[Path], kind: LogKind, plan: PlanFile, stack: str, discard: int
) -> Measurement:
    from typing import cast

    from flopwright.simulator.comparison.foreign import measurement_of_log, measurement_of_traces
    from flopwright.store.foreign.kineto import read_kineto
    from flopwright.store.foreign.steps import StepsKind, read_steps

    if kind is LogKind.KINETO:
        return measurement_of_traces([read_kineto(p) for p in logs], plan, stack=stack)
    log = read_steps(logs[0], cast(StepsKind, kind.value))
    return measurement_of_log(log, plan, stack=stack, discard=discard)


def _record(path: Path, kind: LogKind, name: str, gpus: int | None) -> Record:
    from datetime import UTC, datetime

    from flopwright.report.records import EngineRecord, RoundsRecord, with_own_id
    from flopwright.store.foreign.engines import EngineKind, read_engine_log
    from flopwright.store.foreign.verl import read_verl

    about: dict[str, Any] = {"id": "", "created": "", "name": name, "source": kind.value}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    if kind is LogKind.VERL:
        rounds = with_own_id(RoundsRecord(**about, gpus=gpus, rounds=read_verl(path)))
        return rounds.model_copy(update={"created": now})
    engine: EngineKind = "vllm" if kind is LogKind.VLLM else "sglang"
    log = with_own_id(EngineRecord(**about, lines=read_engine_log(path, engine).lines))
    return log.model_copy(update={"created": now})


def _summary(data: dict[str, Any]) -> str:
    from statistics import median

    from flopwright.units import plural, show_seconds

    if data["kind"] == "measurement":
        steps = len(data["step_time_samples_s"])
        time = show_seconds(data["metrics"]["step_time_s"])
        return f"{data['plan_name']}: {time} a step, the median of {plural(steps, 'line')}"
    if data["kind"] == "rounds":
        times = [r["round_time_s"] for r in data["rounds"]]
        middle = show_seconds(median(times))
        return f"{data['name']}: {middle} a round, the median of {plural(len(times), 'round')}"
    return f"{data['name']}: {plural(len(data['lines']), 'line')} of the engine"
