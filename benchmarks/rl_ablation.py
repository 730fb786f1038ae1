"""What each term of the engines, synchronisations and trainers of 2025 does to every RL preset.

    python benchmarks/rl_ablation.py [FOLDER] [--json OUT] [--only TERM ...] [--presets P ...]

FOLDER (else FLOPWRIGHT_MEASURED_DATA) holds validation/rl_runs.csv. Every loop of the published
scenarios is predicted as it stands and with one term at a time taken away: the term's number is
put back to that of the current engine, or to what the simulator says without it. Medians of
|predicted / measured - 1| over a preset's absolute rows and ratios; fits are made anew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from flopwright.simulator.accuracy.rl.load import FOLDER, load_scenarios
from flopwright.simulator.accuracy.rl.predictor import Predictor
from flopwright.simulator.accuracy.rl.rows import Row, read_rows
from flopwright.simulator.accuracy.rl.schema import RlScenario
from flopwright.simulator.accuracy.rl.score import Scored, score_row
from flopwright.simulator.rollouts.engine.software import engine_software
from flopwright.spec.rollouts.experiment import LoopExperiment

Change = Callable[[LoopExperiment], LoopExperiment]
# Numbers of an engine that are put back, by term.
ENGINE_TERMS: Final[dict[str, dict[str, float]]] = {
    "padded tiles": {"decode_tile_rows": 1},
    "slow decode kernels": {"decode_share": 1.0, "latent_decode_share": 1.0},
    "host time of attempts": {"attempt_host_s": 1e-5},
    "sampling's bytes": {"logit_bytes": 8.0},
}
_STACK: Final = "megatron_bridge-25.11"


def without_engine_term(numbers: dict[str, float]) -> Change:
    """Returns the change that gives an experiment's engine other numbers."""

    def change(given: LoopExperiment) -> LoopExperiment:
        setup = given.rollout.engine
        if setup.numbers is not None:
            return given
        named = setup.software
        engine = engine_software(named) if isinstance(named, str) else named
        setup = setup.model_copy(update={"software": engine.model_copy(update=numbers)})
        rollout = given.rollout.model_copy(update={"engine": setup})
        return given.model_copy(update={"rollout": rollout})

    return change


def without_sync(given: LoopExperiment) -> LoopExperiment:
    """Puts the rate and the seconds a tensor of a synchronisation back to the link's."""
    if given.sync is None or given.sync.rate_bytes_per_s is None:
        return given
    plain = {"rate_bytes_per_s": None, "tensor_s": 50e-6, "fixed_s": 0.0}
    return given.model_copy(update={"sync": given.sync.model_copy(update=plain)})


def changed(scenario: RlScenario, term: str) -> RlScenario:
    """Returns a scenario without a term."""
    given = scenario.experiment
    if not isinstance(given, LoopExperiment):
        return scenario
    if term in ENGINE_TERMS:
        given = without_engine_term(ENGINE_TERMS[term])(given)
    elif term == "weights' way":
        given = without_sync(given)
    elif given.update is not None:
        update = {"mfu": None, "overhead": 1.0, "stack": given.update.stack or _STACK}
        given = given.model_copy(update={"update": given.update.model_copy(update=update)})
    return scenario.model_copy(update={"experiment": given})


TERMS: Final = (*ENGINE_TERMS, "weights' way", "trainers' MFU")


def medians(scenarios: dict[str, RlScenario], rows: dict[str, Row], presets: set[str]) -> Any:
    """Returns the median error of each preset's absolute rows and ratios, in one dict."""
    predictor, found = Predictor(scenarios, rows), {}
    for scenario in scenarios.values():
        if scenario.preset not in presets or not isinstance(scenario.experiment, LoopExperiment):
            continue
        for given in scenario.rows:
            if given.row_class not in {"F2", "R"} or given.id not in rows:
                continue
            result = score_row(predictor, scenario, given, rows[given.id])
            if isinstance(result, Scored):
                kind = "ratios" if given.row_class == "R" else "absolute"
                found.setdefault(f"{scenario.preset}, {kind}", []).append(abs(result.error))
    return {name: statistics.median(errors) for name, errors in sorted(found.items())}


def main() -> None:
    """Prints the medians with all terms and without each; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=os.environ.get("FLOPWRIGHT_MEASURED_DATA"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=TERMS, default=list(TERMS))
    parser.add_argument("--presets", nargs="*")
    options = parser.parse_args()
    if options.folder is None:
        parser.error("FOLDER is needed: the measured rows are not shipped")
    rows = read_rows(Path(options.folder) / "validation" / "rl_runs.csv")
    scenarios = load_scenarios(FOLDER)
    presets = set(options.presets or (s.preset for s in scenarios.values())) - {"tailsieve"}
    record: dict[str, Any] = {"all": medians(scenarios, rows, presets), "without": {}}
    for term in options.only:
        other = {name: changed(s, term) for name, s in scenarios.items()}
        record["without"][term] = medians(other, rows, presets)
        print(term, record["without"][term], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
