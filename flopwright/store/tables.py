"""The store's tables: which schema this is, measurements, their traces, and other records.

The columns beside `payload` are copies for filtering; `payload` is the whole record, and
the only thing that a measurement is read back from.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Integer, LargeBinary, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from flopwright.report.metrics import Measurement
from flopwright.report.records import FOREIGN, Record
from flopwright.store.frame import phase_of

# The last revision in store/migrations.
STORE_SCHEMA: Final = 2
OWNER: Final = "flopwright"


class Base(DeclarativeBase):
    """Base of the store's tables."""


class SchemaRow(Base):
    """One row: the schema that this store was written with."""

    __tablename__ = "schema_version"

    owner: Mapped[str] = mapped_column(String(32), primary_key=True)
    version: Mapped[int] = mapped_column(Integer)


class MeasurementRow(Base):
    """One measurement; units as in the column names."""

    __tablename__ = "measurements"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    created: Mapped[str] = mapped_column(String(40), index=True)
    kind: Mapped[str] = mapped_column(String(32), index=True)
    plan_name: Mapped[str] = mapped_column(String(256), index=True)
    model_hash: Mapped[str] = mapped_column(String(64))
    scenario_hash: Mapped[str] = mapped_column(String(64))
    stack_id: Mapped[str] = mapped_column(String(64), index=True)
    world_size: Mapped[int] = mapped_column(BigInteger)
    step_time_s: Mapped[float] = mapped_column(Float(53))
    tokens_per_s: Mapped[float] = mapped_column(Float(53))
    held_out_loss: Mapped[float | None] = mapped_column(Float(53))
    tool_version: Mapped[str] = mapped_column(String(64))
    payload: Mapped[dict[str, Any]] = mapped_column(JSON)
    phase: Mapped[str] = mapped_column(String(64), server_default="")
    source: Mapped[str] = mapped_column(String(64), server_default=OWNER)


class TraceRow(Base):
    """Every rank's actions of a measurement's typical step: gzipped JSON (store/traces.py)."""

    __tablename__ = "traces"

    measurement_id: Mapped[str] = mapped_column(
        String(128), ForeignKey("measurements.id"), primary_key=True
    )
    events: Mapped[bytes] = mapped_column(LargeBinary)


class RecordRow(Base):
    """A record that is no training step: rounds, stages, an engine's log (report/records.py)."""

    __tablename__ = "records"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    created: Mapped[str] = mapped_column(String(40), index=True)
    kind: Mapped[str] = mapped_column(String(32), index=True)
    name: Mapped[str] = mapped_column(String(256), index=True)
    source: Mapped[str] = mapped_column(String(64))
    payload: Mapped[dict[str, Any]] = mapped_column(JSON)


def row_values(measurement: Measurement) -> dict[str, Any]:
    """Returns the column values of a measurement's row."""
    return {
        "id": measurement.id,
        "created": measurement.created,
        "kind": measurement.kind,
        "plan_name": measurement.plan_name,
        "model_hash": str(measurement.plan.get("model_hash", "")),
        "scenario_hash": str(measurement.plan.get("scenario_hash", "")),
        "stack_id": measurement.fingerprint.stack_id(),
        "world_size": measurement.fingerprint.world_size,
        "step_time_s": measurement.metrics.step_time_s,
        "tokens_per_s": measurement.metrics.tokens_per_s,
        "held_out_loss": measurement.held_out_loss,
        "tool_version": measurement.fingerprint.tool_version,
        "payload": measurement.to_data(),
        "phase": phase_of(measurement.plan)[:64],
        "source": measurement.fingerprint.tool_version.partition(" ")[0][:64]
        if measurement.fingerprint.machine == FOREIGN
        else OWNER,
    }


def record_values(record: Record) -> dict[str, Any]:
    """Returns the column values of another record's row."""
    return {
        "id": record.id,
        "created": record.created,
        "kind": record.kind,
        "name": record.name,
        "source": record.source,
        "payload": record.to_data(),
    }
