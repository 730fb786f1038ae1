"""What is special about a published run: why it stands apart, or is read with care."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.accuracy.defaults import Assumed
from flopwright.simulator.accuracy.gpu_names import AMD
from flopwright.simulator.accuracy.model_of_row import RowModel
from flopwright.simulator.accuracy.rows import Configuration
from flopwright.spec.scenario import Scenario
from flopwright.spec.yaml_lines import read_yaml

ODD_ROWS: Final = Path(__file__).with_name("run_of_row_odd.yaml")
# Tiles of a matrix product: a rank's width that is no multiple of it leaves them partly empty.
_ALIGNED: Final = 64


def set_flags(
    configuration: Configuration,
    gpu: str,
    model: RowModel,
    scenario: Scenario,
    plan: ParallelPlan,
    assumed: Assumed,
) -> None:
    """Adds a run's flags to those that were set while its plan was made."""
    flags = assumed.flags
    if gpu in AMD:
        flags.add("amd")
    if model.is_reduced:
        flags.add("reduced-layers")
    if is_composed(configuration):
        flags.add("vtrain-single")
    if plan.tp > scenario.cluster.node.domain_gpus:
        flags.add("tp-across-nodes")
    if model.spec.hidden_size // plan.tp % _ALIGNED:
        flags.add("unaligned")
    reason = odd_rows().get(configuration.id)
    if re.search(r"samples counted as", configuration.notes.lower()):
        reason = "its samples are counted in another unit"
    if reason is not None:
        flags.add("odd")
        assumed.say(f"set apart: {reason}")


def is_composed(configuration: Configuration) -> bool:
    """Returns whether rows are those of vTrain's single-node file, a straight line in batches."""
    where = place(configuration)
    return "vtrain" in where and "single" in where


def place(configuration: Configuration) -> str:
    """Returns source and framework of a configuration, in lower case."""
    return f"{configuration.text('source')} {configuration.text('framework')}".lower()


@cache
def odd_rows() -> Mapping[str, str]:
    """Returns the ids of rows that their publishers or a check found wrong, with the reason."""
    return {
        str(identity): str(entry["reason"])
        for entry in read_yaml(ODD_ROWS).data
        for identity in entry["ids"]
    }
