"""plan.yaml: the contract between planner, simulator and executor.

A plan file carries everything a run needs: the resolved scenario, the parallel plan, the
hashes that the executor checks, and what was predicted by which calibration.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario
from flopwright.units import Bytes, Seconds

SCHEMA_VERSION: Final = 1


class PredictedStep(Spec):
    """The prediction's summary as it stands in the plan file."""

    step_time_s: Seconds = Field(alias="step_time")
    low_s: Seconds = Field(alias="interval80_low")
    high_s: Seconds = Field(alias="interval80_high")
    peak_memory_bytes: Bytes = Field(alias="peak_memory")
    provenance: str
    calibration_id: str | None = None


class PlanFile(Spec):
    """The contents of plan.yaml.

    Attributes:
        model_hash: content hash of scenario.model; a run on another model is refused.
        scenario_hash: content hash of the whole scenario.
        parallel_hash: content hash of `parallel`; a split edited by hand keeps neither the
            name nor the prediction that stand beside it.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    tool_version: str
    name: str = Field(min_length=1)
    model_hash: str
    scenario_hash: str
    parallel_hash: str
    scenario: Scenario
    parallel: ParallelPlan
    predicted: PredictedStep | None = None
