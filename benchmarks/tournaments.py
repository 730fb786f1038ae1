"""How far the planner's choice is from the measured best: tournaments of two miniatures.

    python benchmarks/tournaments.py --out benchmarks/results/tournaments.json

Each tournament is `flopwright tournament` with its own seed: random plans run beside a probe,
a calibration is learnt from both, the planner chooses without having seen its choice run, and
the best plans race for real. The regret is measured(chosen) / measured(best) - 1; beside it
stands what the planner would have lost without a calibration. The file is written after each
tournament, and a second call adds what is missing, so that a machine need not be idle for all
of them in one go.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

from flopwright.cli._tournament_parts import Options
from flopwright.cli._tournament_run import run_tournament
from flopwright.cli._tournament_view import result_data
from flopwright.simulator.calibration.files import write_atomically

SCENARIOS: Final = ("kimi_k2_mini_open_2cpu_fp32", "llama_mini_2cpu_fp32")
WANTED_REGRET: Final = 0.05
_KEPT: Final = (
    "seed", "chosen", "best", "regret", "regret_crossed", "regret_log_std", "spearman",
    "noise_floor", "uncalibrated", "calibrated", "rounds", "scatter_log", "plans", "refused",
    "finished", "machine", "date",
)  # fmt: skip


def play(scenario: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the result of one tournament; its folder is left behind only where asked."""
    options = Options(
        budget_s=arguments.budget,
        timeout_s=arguments.budget,
        top=arguments.top,
        random=arguments.random,
        calibration=None,
        probe_s=arguments.probe_seconds,
        steps_per_turn=arguments.steps_per_turn,
        nproc=None,
        text=arguments.text,
        tokenizer="bpe",
        seed=seed,
        store=None,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        outcome = run_tournament(scenario, folder / f"{scenario}-{seed}", options, quiet=True)
    assert outcome.result is not None, "stopped before the race began"
    data = result_data(outcome)
    return {key: data[key] for key in _KEPT if key in data}


def summary(played: dict[str, list[dict[str, Any]]], seeds: int) -> dict[str, Any]:
    """Returns the figures of all tournaments so far; `ok` is None until all were played."""
    models: dict[str, dict[str, Any]] = {
        scenario: {
            "regret": median(t["regret"] for t in found),
            "uncalibrated_regret": median(t["uncalibrated"]["regret"] for t in found),
            "noise_floor": median(t["noise_floor"] or 0.0 for t in found),
            "spearman": median(t["spearman"] for t in found),
            "uncalibrated_spearman": median(t["uncalibrated"]["spearman"] for t in found),
            "regrets": [t["regret"] for t in found],
            "uncalibrated_regrets": [t["uncalibrated"]["regret"] for t in found],
        }
        for scenario, found in played.items()
        if found
    }
    for model in models.values():
        model["ok"] = model["regret"] <= max(WANTED_REGRET, model["noise_floor"])
    whole = len(models) == len(SCENARIOS) and all(len(f) >= seeds for f in played.values())
    good = all(model["ok"] for model in models.values())
    every = [t for found in played.values() for t in found]
    return {
        "models": models,
        "wanted_regret": WANTED_REGRET,
        "ok": good if whole else None,
        "machine": every[-1]["machine"],
        "date": datetime.now(UTC).date().isoformat(),
        "repeats": min(map(len, played.values())),
        "spread": max(t["scatter_log"] for t in every),
    }


def main() -> None:
    """Plays the tournaments that are missing from the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS)
    parser.add_argument("--seeds", type=int, default=3, help="tournaments of each model")
    parser.add_argument("--budget", type=float, default=100.0, help="seconds of each tournament")
    parser.add_argument("--top", type=int, default=6)
    parser.add_argument("--random", type=int, default=6)
    parser.add_argument("--probe-seconds", type=float, default=15.0)
    parser.add_argument("--steps-per-turn", type=int, default=1)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tournaments.json"))
    parser.add_argument("--keep", type=Path, help="leave the tournaments' folders here")
    parser.add_argument("--again", action="store_true", help="play those in the file anew too")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    played: dict[str, list[dict[str, Any]]] = {name: [] for name in SCENARIOS}
    if arguments.out.exists() and not arguments.again:
        played |= json.loads(arguments.out.read_text(encoding="utf-8"))["tournaments"]
    for seed in range(arguments.seeds):
        for scenario in arguments.scenario or SCENARIOS:
            if any(t["seed"] == seed for t in played[scenario]):
                continue
            played[scenario].append(play(scenario, seed, arguments))
            report = summary(played, arguments.seeds)
            write_atomically(
                arguments.out, json.dumps({**report, "tournaments": played}, indent=1) + "\n"
            )
    print(json.dumps(summary(played, arguments.seeds)))


if __name__ == "__main__":
    main()
