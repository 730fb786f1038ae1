"""What was learnt of a reading of memory beyond a run's tensors, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field

from flopwright.spec.base import Spec
from flopwright.spec.load import dump_yaml
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import read_yaml

CONSTANTS: Final = Path(__file__).with_name("memory_constants.yaml")


class MemoryConstants(Spec):
    """What was learnt from measured runs.

    Attributes:
        factors: measured over the predicted allocated peak, by definition.
        group_bytes: what a card holds beside the allocator for each group of ranks it talks
            in (communicators; the context is one of them); None: what the GPU's catalog file
            assumes for all.
        log_std: spread of measured / predicted, by definition.
    """

    factors: dict[str, float] = Field(default_factory=dict)
    group_bytes: float | None = None
    log_std: dict[str, float] = Field(default_factory=dict)

    @property
    def free_parameters(self) -> int:
        """How many numbers were fitted; spreads do not move a prediction."""
        return len(self.factors) + (self.group_bytes is not None)


def shipped_constants() -> MemoryConstants:
    """Returns the committed constants."""
    return validate(MemoryConstants, read_yaml(CONSTANTS))


def write_constants(constants: MemoryConstants, path: Path) -> None:
    """Writes constants with what they are."""
    rounded = constants.model_copy(
        update={
            "factors": {k: round(v, 4) for k, v in constants.factors.items()},
            "log_std": {k: round(v, 4) for k, v in constants.log_std.items()},
            "group_bytes": constants.group_bytes and round(constants.group_bytes, -6),
        }
    )
    head = (
        "# Fitted by scripts/fit_memory.py to published peaks; medians over models.\n"
        "# Source: peaks of published training runs (docs/accuracy.md lists who measured them); "
        "only\n# fitted coefficients stand here. Licence: Apache-2.0, as this repository. "
        "changed: fitted.\n"
    )
    path.write_text(head + dump_yaml(rounded), encoding="utf-8")
