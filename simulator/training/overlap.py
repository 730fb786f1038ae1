"""What of a chunk's communication is exposed, what hiding it costs, and when the host is late.

A share of each class of communication runs beside compute (Calibration.hidden_share), all
classes together never more than there is compute; compute loses overlap_slowdown seconds for
every second that it hides. What the host needs to launch a chunk's work sets a floor under
its time: kernels queue up, so that forward and backward together count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from flopwright.ops import Array
from flopwright.simulator.calibration.model import Calibration

Classes = dict[str, Array]
# Which share hides a class that does not name its own.
_SHARE_OF: Final = {"dp_micro": "dp_comm"}
_CLASS_OF: Final = {"dp_micro": "dp_comm", "dp_gather": "dp_comm"}


def hidden_share(calibration: Calibration, cls: str) -> float:
    """Returns the share of a communication class that compute can hide."""
    shares = calibration.hidden_share
    return shares.get(cls, shares.get(_SHARE_OF.get(cls, cls), 0.0))


def exposed(
    comm: Mapping[str, Array],
    compute_s: Array,
    calibration: Calibration,
    never: Mapping[str, Array] | None = None,
) -> tuple[Classes, Array]:
    """Returns (exposed seconds by time class, seconds that compute loses by hiding the rest).

    Args:
        comm: seconds by class, nothing hidden.
        compute_s: seconds of compute beside it.
        never: by class, where (booleans) nothing of it can be hidden.
    """
    hidden = {}
    for cls, seconds in comm.items():
        share = hidden_share(calibration, cls)
        if share:
            fixed = (never or {}).get(cls)
            hidden[cls] = (
                share * seconds if fixed is None else np.where(fixed, 0.0, share * seconds)
            )
    out: Classes = {}
    lost = np.zeros_like(compute_s)
    if hidden:
        total = np.asarray(sum(hidden.values()))
        some = np.maximum(total, compute_s)  # divides only where there is something
        fits = np.where(total > compute_s, compute_s / np.where(some > 0, some, 1.0), 1.0)
        for cls in hidden:
            hidden[cls] = hidden[cls] * fits
            slows = calibration.overlap_slowdown
            slow = slows.get(cls, slows.get(_SHARE_OF.get(cls, cls), 0.0))
            if slow:
                lost = lost + slow * hidden[cls]
    for cls, seconds in comm.items():
        name = _CLASS_OF.get(cls, cls)
        left = (seconds - hidden.get(cls, 0.0)) * calibration.factors.get(name, 1.0)
        out[name] = out[name] + left if name in out else left
    return out, lost


def host_wait_s(host_s: Array, forward_s: Array, backward_s: Array) -> tuple[Array, Array]:
    """Returns what forward and backward wait for the host, split as their own times are."""
    total = forward_s + backward_s
    late = np.maximum(host_s - total, 0.0)
    share = np.where(total > 0, forward_s / np.where(total > 0, total, 1.0), 1 / 3)
    return late * share, late * (1 - share)
