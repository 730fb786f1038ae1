"""The name of a calibration: its content, so that equal ids mean equal numbers."""

from __future__ import annotations

import hashlib
import json

from flopwright.simulator.calibration.model import Calibration


def with_id(calibration: Calibration, prefix: str) -> Calibration:
    """Returns the calibration with the id `<prefix>-<8 hex digits of its content>`.

    The time of creation is left out: the same fit of the same data has the same id.
    """
    data = calibration.to_data()
    for key in ("id", "created"):
        data.pop(key)
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return calibration.model_copy(update={"id": f"{prefix}-{digest}"})
