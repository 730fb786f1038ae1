"""Fitted curves of collectives on a link: what share of its bandwidth a message reaches.

One message-size curve: seconds = base_s + (w / share + sqrt(w * ramp_bytes)) / b, with w the
bytes that a GPU puts on the link, b its bandwidth. The root is the ramp: small messages do
not fill the pipe, large ones come up to `share`. It grows with w and is never faster than b.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from pydantic import Field, NonNegativeFloat

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
        sms: streaming multiprocessors that a collective occupies, by curve; 0 of one not named.
        gpu_sms: those of the GPU.
        sources: where numbers come from that no table gave, by field.
    """

    name: str
    source: str
    curves: dict[str, tuple[SizeCurve, ...]]
    hop_s: NonNegativeFloat
    nvls_above: int | None = None
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


def base_s(link: LinkCurves, name: str, ranks: Array, passes: float) -> Array:
    """Returns the seconds of an empty call between so many ranks."""
    mine = link.curves[name]
    sizes = np.log2([c.ranks for c in mine])
    inside = np.interp(np.log2(ranks), sizes, [c.base_s for c in mine])
    beyond = np.maximum(ranks - mine[-1].ranks, 0.0)
    return np.asarray(inside + passes * beyond * link.hop_s)


def stream_s(link: LinkCurves, name: str, ranks: Array, wire: Array, bytes_per_s: Array) -> Array:
    """Returns the seconds of moving `wire` bytes a GPU, without the empty call."""
    mine = link.curves[name]
    sizes, at = np.log2([c.ranks for c in mine]), np.log2(ranks)
    share = np.interp(at, sizes, [c.share for c in mine])
    ramp = np.interp(at, sizes, [c.ramp_bytes for c in mine])
    return np.asarray((wire / share + np.sqrt(wire * ramp)) / bytes_per_s)
