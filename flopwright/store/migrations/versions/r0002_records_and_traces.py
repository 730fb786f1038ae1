"""Rounds, stages and engine logs beside steps; traces; what part of a training a run was."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Adds two tables, and a column that is filled from what is stored."""
    op.create_table(
        "records",
        sa.Column("id", sa.String(128), primary_key=True),
        sa.Column("created", sa.String(40), nullable=False, index=True),
        sa.Column("kind", sa.String(32), nullable=False, index=True),
        sa.Column("name", sa.String(256), nullable=False, index=True),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
    )
    op.create_table(
        "traces",
        sa.Column(
            "measurement_id", sa.String(128), sa.ForeignKey("measurements.id"), primary_key=True
        ),
        sa.Column("events", sa.LargeBinary(), nullable=False),
    )
    op.add_column(
        "measurements",
        sa.Column("phase", sa.String(64), nullable=False, server_default=""),
    )
    op.add_column(
        "measurements",
        sa.Column("source", sa.String(64), nullable=False, server_default="flopwright"),
    )
    _fill_phases()
    op.execute("UPDATE schema_version SET version = 2 WHERE owner = 'flopwright'")


def _fill_phases() -> None:
    table = sa.table(
        "measurements", sa.column("id"), sa.column("payload", sa.JSON()), sa.column("phase")
    )
    connection = op.get_bind()
    for row in connection.execute(sa.select(table.c.id, table.c.payload)).all():
        kind = _workload_kind(row.payload)
        if kind:
            connection.execute(table.update().where(table.c.id == row.id).values(phase=kind[:64]))


def _workload_kind(payload: Any) -> str:
    """Returns the workload's kind of a stored plan; "" of one that cannot be read."""
    if isinstance(payload, str):
        try:
            payload = json.loads(payload)
        except json.JSONDecodeError:
            return ""
    for key in ("plan", "scenario", "workload", "kind"):
        payload = payload.get(key, "") if isinstance(payload, dict) else ""
    return payload if isinstance(payload, str) else ""
