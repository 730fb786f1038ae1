"""How long each entry of each rank takes by itself."""

from __future__ import annotations

import numpy as np

from flopwright.ops import Array
from flopwright.simulator.training.durations import (
    Disturbance,
    Durations,
    disturbed_seconds,
    pair_parts,
)
from flopwright.simulator.training.program import Program


class RankSeconds:
    """Seconds of each rank's entries: their own, and in exchanges with other replicas."""

    def __init__(
        self,
        program: Program,
        durations: Durations,
        disturbance: Disturbance | None,
        sample: int,
    ) -> None:
        self._disturbed = disturbance is not None
        self._pairs: dict[int, tuple[Array, Array]] = {}
        if disturbance is not None:
            own, exchange = disturbed_seconds(program, durations, disturbance)
            self._own = [x[:, sample] for x in own]
            self._exchange = [x[:, sample] for x in exchange]
            self._pairs = {
                i: ((halves[0] + halves[1])[sample], exchanges[0] + exchanges[1])
                for i, (halves, exchanges) in pair_parts(program, durations, disturbance).items()
            }
            return
        own_rows, exchange_rows = durations.parts(program)
        for name, rows in (("_own", own_rows), ("_exchange", exchange_rows)):
            padded = np.append(rows, 0.0)  # a receive's row is -1
            places: list[list[int]] = [[] for _ in range(program.num_stages)]
            for code in program.codes:
                places[code.stage].append(code.row)
            setattr(self, name, [padded[np.array(r)][:, None] for r in places])

    def of(self, stage: int, replica: int) -> tuple[list[float], list[float]]:
        """Returns (own, exchange) seconds by place in the rank's list."""
        column = replica if self._disturbed else 0
        own: list[float] = self._own[stage][:, column].tolist()
        exchange: list[float] = self._exchange[stage][:, column].tolist()
        return own, exchange

    def pair(self, i: int, replica: int) -> tuple[float, float] | None:
        """Returns work and exchange of a pair by its second half; None where ranks are alike."""
        found = self._pairs.get(i)
        return None if found is None else (float(found[0][replica]), float(found[1][replica]))
