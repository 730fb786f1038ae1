"""`flopwright schema`: JSON Schema of the file kinds, for editors."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flopwright.errors import InputError, Violation, did_you_mean


def schema(
    kind: Annotated[str, typer.Argument(help="scenario, rollout, model, cluster, gpu or plan")],
) -> None:
    """Print the JSON Schema of a file kind, so that an editor completes and checks it.

    Example: flopwright schema scenario > scenario.schema.json
    """
    from flopwright.cli._json_schema import file_schema
    from flopwright.plan.file import PlanFile
    from flopwright.spec.base import Spec
    from flopwright.spec.cluster import ClusterSpec, GpuSpec
    from flopwright.spec.model import ModelSpec
    from flopwright.spec.rollout import RolloutScenario
    from flopwright.spec.scenario import Scenario

    kinds: dict[str, type[Spec]] = {
        "scenario": Scenario,
        "rollout": RolloutScenario,
        "model": ModelSpec,
        "cluster": ClusterSpec,
        "gpu": GpuSpec,
        "plan": PlanFile,
    }
    if kind not in kinds:
        raise InputError(
            Violation(
                field="kind",
                value=repr(kind),
                rule="no such file kind",
                nearest_fix=did_you_mean(kind, kinds),
            )
        )
    typer.echo(json.dumps(file_schema(kind, kinds[kind]), indent=1))
