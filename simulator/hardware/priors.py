"""How fast a GPU really runs each kernel class, before anything was measured on it.

The numbers stand in `efficiency/*.yaml`, one file a GPU family, each with its source. They
belong to kernel classes and links, never to a model or a published run.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pydantic import Field

from flopwright.simulator.calibration.model import Calibration, EfficiencyCurve
from flopwright.spec.base import Spec
from flopwright.spec.cluster import GpuSpec
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import read_yaml

_FOLDER = Path(__file__).parent / "efficiency"
# Spread of a prior that was made for another processor: a factor of two either way.
_UNKNOWN_GPU_LOG_STD = 0.4


class SourcedCurve(EfficiencyCurve):
    """An efficiency curve and where its numbers come from."""

    source: str = Field(min_length=1)


class SourcedShare(Spec):
    """Share of a communication class hidden behind compute, and where it comes from."""

    share: float = Field(ge=0, le=1)
    source: str = Field(min_length=1)


class EfficiencyPrior(Spec):
    """One file of `efficiency/`."""

    id: str
    created: str
    source: str
    gpus: tuple[str, ...]
    step_residual_log: float = Field(gt=0)
    step_residual_source: str = Field(min_length=1)
    hidden_share: dict[str, SourcedShare] = Field(default_factory=dict)
    curves: tuple[SourcedCurve, ...] = Field(min_length=1)

    def to_calibration(self) -> Calibration:
        """Returns the numbers without their sources, as the simulator takes them."""
        return Calibration(
            id=self.id,
            created=self.created,
            source=self.source,
            curves=tuple(
                EfficiencyCurve.model_validate(c.model_dump(by_alias=False, exclude={"source"}))
                for c in self.curves
            ),
            hidden_share={k: v.share for k, v in self.hidden_share.items()},
            step_residual_log=self.step_residual_log,
        )


@lru_cache(maxsize=1)
def efficiency_priors() -> tuple[EfficiencyPrior, ...]:
    """Returns every prior that ships with the tool, by file name."""
    return tuple(validate(EfficiencyPrior, read_yaml(p)) for p in sorted(_FOLDER.glob("*.yaml")))


def prior_calibration(gpu: GpuSpec) -> Calibration:
    """Returns the public prior of a processor.

    A GPU that no file names borrows the shape of the H100 curves against its own datasheet
    peaks, a CPU that of the `cpu` file; the calibration's id and source say so, and its
    spread is doubled.
    """
    priors = {name: p for p in efficiency_priors() for name in p.gpus}
    if gpu.name in priors:
        return priors[gpu.name].to_calibration()
    like = "cpu" if gpu.kind == "cpu" else "h100_sxm"
    borrowed = priors[like].to_calibration()
    return borrowed.model_copy(
        update={
            "id": f"{borrowed.id}_borrowed",
            "source": f"no prior for {gpu.name}: shares of the peak as on {like}",
            "step_residual_log": max(_UNKNOWN_GPU_LOG_STD, borrowed.step_residual_log),
        }
    )
