"""Measurements of training steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Makes the first two tables."""
    op.create_table(
        "schema_version",
        sa.Column("owner", sa.String(32), primary_key=True),
        sa.Column("version", sa.Integer(), nullable=False),
    )
    op.create_table(
        "measurements",
        sa.Column("id", sa.String(128), primary_key=True),
        sa.Column("created", sa.String(40), nullable=False, index=True),
        sa.Column("kind", sa.String(32), nullable=False, index=True),
        sa.Column("plan_name", sa.String(256), nullable=False, index=True),
        sa.Column("model_hash", sa.String(64), nullable=False),
        sa.Column("scenario_hash", sa.String(64), nullable=False),
        sa.Column("stack_id", sa.String(64), nullable=False, index=True),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("step_time_s", sa.Float(53), nullable=False),
        sa.Column("tokens_per_s", sa.Float(53), nullable=False),
        sa.Column("held_out_loss", sa.Float(53), nullable=True),
        sa.Column("tool_version", sa.String(64), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
    )
    op.execute("INSERT INTO schema_version (owner, version) VALUES ('flopwright', 1)")
