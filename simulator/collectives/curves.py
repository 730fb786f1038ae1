"""Fitted curves of collectives on a link: what share of its bandwidth a message reaches.

One message-size curve: seconds = base_s + (w / share + sqrt(w * ramp_bytes)) / b, with w the
bytes that a GPU puts on the link, b its bandwidth. The root is the ramp: small messages do
not fill the pipe, large ones come up to `share`. It grows with w and is never faster than b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat

import flopwright
from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.ops import Array
from flopwright.spec.base import Spec
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import read_yaml

FOLDER: Final = Path(flopwright.__file__).parent / "simulator" / "hardware" / "links"


class SizeCurve(Spec):
    """One collective between `ranks` GPUs (module docstring).

    Attributes:
        residual_log: standard deviation of log(measured / fitted) over `points` points.
    """

    ranks: int = Field(ge=2)
    base_s: NonNegativeFloat
    share: float = Field(gt=0, le=1)
    ramp_bytes: NonNegativeFloat
    residual_log: NonNegativeFloat = 0.0
    points: int = 0


class LinkCurves(Spec):
    """Curves of one link (LinkSpec.curve names the file).

    Attributes:
        curves: by collective and algorithm ("all_reduce_ring"), growing in ranks.
        hop_s: what each rank beyond the curves' largest group adds to one pass of a ring.
        nvls_above: GPUs of a node above which all-reduce may go through the switch (NVLink
            SHARP); None of a link that cannot.
        max_adapters: adapters of a node that one collective keeps busy at most: NCCL has fewer
            channels than an NVL72 rack has adapters; None of as many as the group has ranks.
        sms: streaming multiprocessors that a collective occupies, by curve; 0 of one not named.
        gpu_sms: those of the GPU.
        sources: where numbers come from that no table gave, by field.
    """

    name: str
    source: str
    curves: dict[str, tuple[SizeCurve, ...]]
    hop_s: NonNegativeFloat
    nvls_above: int | None = None
    max_adapters: PositiveFloat | None = None
    sms: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    gpu_sms: int | None = Field(default=None, ge=1)
    sources: dict[str, str] = Field(default_factory=dict)


@lru_cache(maxsize=64)
def load_link(name: str) -> LinkCurves:
    """Returns the curves of a link by name.

    Raises:
        InputError: no such file.
    """
    path = FOLDER / f"{name}.yaml"
    known = sorted(p.stem for p in FOLDER.glob("*.yaml"))
    if name not in known:
        raise InputError(
            Violation(
                field="link.curve",
                value=repr(name),
                rule="no curves of such a link",
                nearest_fix=did_you_mean(name, known),
            )
        )
    return validate(LinkCurves, read_yaml(path))


@dataclass(frozen=True, slots=True)
class Table:
    """One collective's curves by rank: looked up, and interpolated in log2(ranks) once.

    Attributes:
        base_s: of an empty call between 0, 1, 2 ... ranks, up to the largest group fitted.
        inverse_share, root_ramp: 1 / share and sqrt(ramp_bytes).
        hop_s: what each rank beyond them adds to a pass.
    """

    base_s: Array
    inverse_share: Array
    root_ramp: Array
    hop_s: float

    def empty_s(self, ranks: Array, passes: float) -> Array:
        """Returns the seconds of an empty call between so many ranks."""
        last = len(self.base_s) - 1
        beyond = np.maximum(ranks - last, 0.0)
        return np.asarray(self.base_s[self._index(ranks)] + passes * self.hop_s * beyond)

    def stream_s(self, ranks: Array, wire: Array, bytes_per_s: Array | float) -> Array:
        """Returns the seconds of moving `wire` bytes a GPU, without the empty call."""
        at = self._index(ranks)
        ramp = np.sqrt(wire) * self.root_ramp[at]
        return np.asarray((wire * self.inverse_share[at] + ramp) / bytes_per_s)

    def _index(self, ranks: Array) -> NDArray[np.intp]:
        return np.minimum(ranks, len(self.base_s) - 1).astype(np.intp)


def table(link: LinkCurves, name: str) -> Table:
    """Returns one collective's curves of a link, ready to be looked up."""
    mine = link.curves[name]
    ranks = np.maximum(np.arange(mine[-1].ranks + 1), 1)
    at, sizes = np.log2(ranks), np.log2([c.ranks for c in mine])

    def at_each(values: list[float]) -> Array:
        return np.asarray(np.interp(at, sizes, values))

    return Table(
        base_s=at_each([c.base_s for c in mine]),
        inverse_share=at_each([1 / c.share for c in mine]),
        root_ramp=at_each([math.sqrt(c.ramp_bytes) for c in mine]),
        hop_s=link.hop_s,
    )
