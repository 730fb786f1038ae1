"""`flopwright schema`: JSON Schema of the file kinds, for editors."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flopwright.errors import InputError, Violation, did_you_mean

if TYPE_CHECKING:
    from flopwright.spec.base import Spec

# file kind -> where its record stands
KINDS: Final[dict[str, str]] = {
    "scenario": "flopwright.spec.scenario:Scenario",
    "rollout": "flopwright.spec.rollout:RolloutScenario",
    "loop": "flopwright.spec.loop:LoopScenario",
    "experiment": "flopwright.simulator.accuracy.rl.schema:RlScenario",
    "served": "flopwright.spec.rollouts.engine_served:ServedModel",
    "engine": "flopwright.spec.rollouts.engine_served:EngineSoftware",
    "model": "flopwright.spec.model:ModelSpec",
    "cluster": "flopwright.spec.cluster:ClusterSpec",
    "gpu": "flopwright.spec.cluster:GpuSpec",
    "plan": "flopwright.plan.file:PlanFile",
    "loop_plan": "flopwright.plan.loop:LoopPlan",
}


def schema(
    kind: Annotated[str, typer.Argument(help=", ".join(KINDS))],
) -> None:
    """Print the JSON Schema of a file kind, so that an editor completes and checks it.

    Example: flopwright schema scenario > scenario.schema.json
    """
    from flopwright.cli._json_schema import file_schema

    if kind not in KINDS:
        raise InputError(
            Violation(
                field="kind",
                value=repr(kind),
                rule="no such file kind",
                nearest_fix=did_you_mean(kind, KINDS),
            )
        )
    typer.echo(json.dumps(file_schema(kind, _record(kind)), indent=1))


def _record(kind: str) -> type[Spec]:
    module, _, name = KINDS[kind].partition(":")
    record: type[Spec] = getattr(import_module(module), name)
    return record
