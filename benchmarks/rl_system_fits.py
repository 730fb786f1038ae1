"""The numbers of AReaL that were fitted on its absolute rows, and each row left out of the fit.

    python benchmarks/rl_system_fits.py [FOLDER] [--share S ...] [--overhead O ...]

FOLDER (else FLOPWRIGHT_MEASURED_DATA) holds validation/rl_runs.csv. On the grid of both numbers
(bandwidth of SGLang's decode attention as a share of the tables', trainer's
time over that of a Megatron stack) the pair
with the least mean |log(predicted / measured)| is taken: of all six rows, and of five of them,
which then predict the sixth. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
from pathlib import Path
from typing import Any, Final

from flopwright.simulator.accuracy.rl.load import FOLDER, load_scenarios
from flopwright.simulator.accuracy.rl.outcome import outcome_of
from flopwright.simulator.accuracy.rl.rows import Row, read_rows
from flopwright.simulator.accuracy.rl.schema import RlScenario
from flopwright.simulator.rollouts.engine.software import engine_software
from flopwright.spec.rollouts.experiment import LoopExperiment

SHARES: Final = (0.35, 0.40, 0.45)
OVERHEADS: Final = (1.25, 1.4, 1.55)


def errors(
    scenarios: list[RlScenario], rows: dict[str, Row], share: float, overhead: float
) -> dict[str, float]:
    """Returns log(predicted / measured) of the absolute rows under both numbers."""
    engine = engine_software("sglang_2025").model_copy(update={"decode_share": share})
    out = {}
    for scenario in scenarios:
        given = scenario.experiment
        assert isinstance(given, LoopExperiment)
        assert given.update is not None
        setup = given.rollout.engine.model_copy(update={"software": engine})
        changed = given.model_copy(
            update={
                "rollout": given.rollout.model_copy(update={"engine": setup}),
                "update": given.update.model_copy(update={"overhead": overhead}),
            }
        )
        found = outcome_of(changed)
        for row in scenario.rows:
            if row.row_class == "F2" and row.metric is not None:
                measured = rows[row.id].values[0].middle
                out[row.id] = math.log(found.metric(row.metric) / measured)
    return out


def main() -> None:
    """Prints the errors of every pair, the pair that is taken, and every row left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=os.environ.get("FLOPWRIGHT_MEASURED_DATA"))
    parser.add_argument("--share", nargs="*", type=float, default=SHARES)
    parser.add_argument("--overhead", nargs="*", type=float, default=OVERHEADS)
    options = parser.parse_args()
    if options.folder is None:
        parser.error("FOLDER is needed: the measured rows are not shipped")
    rows = read_rows(Path(options.folder) / "validation" / "rl_runs.csv")
    scenarios = [
        s
        for s in load_scenarios(FOLDER).values()
        if s.preset == "areal" and any(r.row_class == "F2" for r in s.rows)
    ]
    tried: dict[tuple[float, float], dict[str, float]] = {}
    for share, overhead in itertools.product(options.share, options.overhead):
        tried[share, overhead] = errors(scenarios, rows, share, overhead)
        shown = ", ".join(f"{i} {math.expm1(e):+.1%}" for i, e in tried[share, overhead].items())
        print(f"share {share:g}, overhead {overhead:g}: {shown}", flush=True)
    print(json.dumps(chosen(tried)))


def chosen(tried: dict[tuple[float, float], dict[str, float]]) -> dict[str, Any]:
    """Returns the pair that all rows choose, their median error, and that of rows left out."""

    def best(ids: list[str]) -> tuple[float, float]:
        return min(tried, key=lambda pair: sum(abs(tried[pair][i]) for i in ids))

    ids = list(next(iter(tried.values())))
    pair = best(ids)
    left_out = {i: tried[best([j for j in ids if j != i])][i] for i in ids}
    return {
        "decode_share": pair[0],
        "overhead": pair[1],
        "median_error": statistics.median(abs(math.expm1(tried[pair][i])) for i in ids),
        "left_out_median_error": statistics.median(abs(math.expm1(e)) for e in left_out.values()),
        "left_out": {i: math.expm1(e) for i, e in left_out.items()},
    }


if __name__ == "__main__":
    main()
