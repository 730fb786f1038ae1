"""`flopwright import-log`: another program's log or trace goes into the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
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
_MEASURED = frozenset({LogKind.MEGATRON, LogKind.TORCHTITAN, LogKind.DEEPSPEED, LogKind.KINETO})


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
    machine: Annotated[
        str | None,
        typer.Option("--machine", help="Which of several equal machines; each has its series."),
    ] = None,
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

    _check_names(kind, name, machine)
    ran = _Ran(stack=stack, host=machine or "", discard=discard)
    found = _read(logs, kind, plan, name, ran, gpus)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """What the command line says of a training run."""

    stack: str
    host: str
    discard: int


def _check_names(kind: LogKind, name: str | None, machine: str | None) -> None:
    """Refuses names that no table can show, and a machine where nothing has a series."""
    from flopwright.errors import InputError, Violation

    rule = f"must be printable text of 1 to {_LONGEST_NAME} characters"
    wrong = []
    if name is not None and not _is_name(name):
        fix = "leave it out: the plan's or the file's name is taken"
        wrong.append(Violation(field="--name", value=ascii(name[:40]), rule=rule, nearest_fix=fix))
    if machine is not None and not _is_name(machine):
        fix = "leave it out, or name the host"
        wrong.append(
            Violation(field="--machine", value=ascii(machine[:40]), rule=rule, nearest_fix=fix)
        )
    if machine is not None and kind not in _MEASURED:
        rule = f"goes with {', '.join(sorted(_MEASURED))}: a log of {kind} is no step of a series"
        fix = "leave it out; --name tells logs apart"
        wrong.append(Violation(field="--machine", rule=rule, nearest_fix=fix))
    if wrong:
        raise InputError(wrong)


def _read(
    logs: Sequence[Path],
    kind: LogKind,
    plan: Path | None,
    name: str | None,
    ran: _Ran,
    gpus: int | None,
) -> tuple[Measurement | None, Record | None]:
    """Returns the measurement, or the other record, that the logs hold."""
    from flopwright.errors import InputError, Violation

    if kind is not LogKind.KINETO and len(logs) > 1:
        raise InputError(
            Violation(field="LOGS", value=str(len(logs)), rule=f"{kind} takes one log at a time")
        )
    if kind in _MEASURED:
        of = _plan(plan, kind)
        if name is not None:
            of = of.model_copy(update={"name": name})
        return _measured(logs, kind, of, ran), None
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


def _measured(logs: Sequence[Path], kind: LogKind, plan: PlanFile, ran: _Ran) -> Measurement:
    from typing import cast

    from flopwright.simulator.comparison.foreign import measurement_of_log, measurement_of_traces
    from flopwright.store.foreign.kineto import read_kineto
    from flopwright.store.foreign.steps import StepsKind, read_steps

    if kind is LogKind.KINETO:
        traces = [read_kineto(p) for p in logs]
        return measurement_of_traces(traces, plan, stack=ran.stack, host=ran.host)
    log = read_steps(logs[0], cast(StepsKind, kind.value))
    return measurement_of_log(log, plan, stack=ran.stack, host=ran.host, discard=ran.discard)


def _record(path: Path, kind: LogKind, name: str, gpus: int | None) -> Record:
    from datetime import UTC, datetime

    from flopwright.report.records import EngineRecord, RoundsRecord, with_own_id
    from flopwright.store.foreign.engines import EngineKind, read_engine_log
    from flopwright.store.foreign.text import iso_of
    from flopwright.store.foreign.verl import read_verl

    about: dict[str, Any] = {"id": "", "created": "", "name": name, "source": kind.value}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    if kind is LogKind.VERL:
        rounds = with_own_id(RoundsRecord(**about, gpus=gpus, rounds=read_verl(path)))
        return rounds.model_copy(update={"created": now})
    engine: EngineKind = "vllm" if kind is LogKind.VLLM else "sglang"
    found = read_engine_log(path, engine)
    log = with_own_id(EngineRecord(**about, lines=found.lines))
    created = now if found.ended_s is None else iso_of(found.ended_s)
    return log.model_copy(update={"created": created})


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
