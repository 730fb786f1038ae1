"""A mini Kimi K2 learns the sources of Python's standard library: MuonClip against AdamW.

    python benchmarks/pretrain.py [--steps N] [--out FOLDER] [--result FILE.json] [--png FILE.png]

Everything is trained by `flopwright run`, one process each, as many at once as there are cores
(--jobs):

1. explosion  Muon at a learning rate far too high, once with QK-Clip's bound out of reach (the
              largest attention logit of each step is recorded and nothing is done) and once
              with the bound at 100;
2. pilots     short trainings of both optimizers, the same rates and steps for each; the rate
              with the lowest training loss at the end is taken, of two that tie the lower
              one (held-out text chooses nothing);
3. main       both at their rates over the same tokens in the same order;
4. shuffled   a training on the text's characters in random order: nothing can be learnt from
              what stands before, so it must not get below the bars.

The bars are what counts of one and of two tokens reach on the same held-out text. The same
command goes on with what a stopped one left in FOLDER. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pretraining.picture import draw
from pretraining.place import Job, Place
from pretraining.shuffled import shuffled_text

from flopwright.executor.data.batches import open_dataset
from flopwright.executor.launch.machine import available_cores
from flopwright.executor.launch.request import (
    DATA_DIR,
    REQUEST_FILE,
    read_request,
)
from flopwright.executor.measure.fingerprint import processor_name
from flopwright.spec.workload import LearningRate, Optimizer

PARTS: Final = ("explosion", "pilots", "main", "shuffled")
TAU: Final = 100.0
NO_TAU: Final = 1e30  # logits are recorded, and none ever reaches it
OPTIMIZERS: Final = {
    "adamw": Optimizer(kind="adamw"),
    "muonclip": Optimizer(kind="muon", qk_clip_tau=TAU),
}
# The explosion: the rate, and the batch, which is small since nothing is to be learnt.
EXPLOSION_BATCH: Final = (4, 64)
# Held-out loss so far below the bigram entropy counts as well below, in nats a token.
WELL_BELOW: Final = 0.5
# Pilots nearer to each other tell nothing, in nats a token.
TIE: Final = 0.01
# By how much chance may put a loss below counts of the same text, in nats a token.
CHANCE: Final = 0.01
# Bins of a curve in the result and in the picture.
POINTS: Final = 100


def cosine(peak: float, steps: int) -> LearningRate:
    """Returns the schedule of pilots and trainings: up over a tenth at most, down to a tenth."""
    return LearningRate(
        kind="cosine", peak=peak, final=peak / 10, warmup_steps=min(50, steps // 10)
    )


def tail(values: Sequence[float], share: float = 0.25) -> float:
    """Returns the mean of the last part of a sequence."""
    return statistics.fmean(values[-max(1, round(share * len(values))) :])


def binned(values: Sequence[float], points: int = POINTS, of: Any = statistics.fmean) -> Any:
    """Returns [(last index + 1, `of` the bin)] of at most `points` bins of equal length."""
    size = -(-len(values) // points)
    starts = range(0, len(values), size)
    return [(min(i + size, len(values)), round(of(values[i : i + size]), 4)) for i in starts]


def explosion(place: Place, steps: int, peak: float) -> dict[str, Any]:
    """Returns what becomes of the largest attention logit, without and with QK-Clip."""
    rate = LearningRate(kind="constant", peak=peak, final=0, warmup_steps=0)
    jobs = {
        name: Job(
            name=f"explosion-{name}",
            optimizer=Optimizer(kind="muon", qk_clip_tau=tau),
            rate=rate,
            steps=steps,
            batch=EXPLOSION_BATCH,
            saves=False,
        )
        for name, tau in (("recorded", NO_TAU), ("clipped", TAU))
    }
    place.train(list(jobs.values()))
    return {"learning_rate": peak, **judged({n: place.rows(j) for n, j in jobs.items()})}


def judged(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns the figures of an explosion: `recorded` had no bound, `clipped` had TAU.

    It is stopped if without the bound it goes on (the last tenth is above three times the
    bound), and with it it stays: the last tenth is below one and a half times the bound, and no
    step above twice. The clip holds for the batch it saw: another one and one more update of
    this size come out above it, as much as from step to step without it.
    """
    logits = {name: [float(r["max_logit"]) for r in each] for name, each in rows.items()}
    free, held = logits["recorded"], logits["clipped"]
    over = next((i for i, x in enumerate(free) if x > TAU), None)
    return {
        "tau": TAU,
        "steps": len(free),
        "first_step_over_tau": over,
        "max_logit_recorded": round(tail(free, 0.1), 1),
        "max_logit_clipped": round(tail(held, 0.1), 1),
        "largest_logit_clipped": round(max(held), 1),
        "clipped_heads": sum(r["clipped_heads"] for r in rows["clipped"]),
        "loss_recorded": round(tail([r["loss"] for r in rows["recorded"]], 0.1), 3),
        "loss_clipped": round(tail([r["loss"] for r in rows["clipped"]], 0.1), 3),
        "stopped": over is not None
        and tail(free, 0.1) > 3 * TAU
        and tail(held, 0.1) < 1.5 * TAU
        and max(held) < 2 * TAU,
        "curves": {n: binned(each, of=max) for n, each in logits.items()},
    }


def pilots(
    place: Place, rates: Sequence[float], steps: int, batch: tuple[int, int]
) -> dict[str, dict[float, float]]:
    """Returns by optimizer and rate the training loss over the last quarter of the steps."""
    jobs = {
        (name, peak): Job(
            name=f"pilot-{name}-{peak:g}",
            optimizer=optimizer,
            rate=cosine(peak, steps),
            steps=steps,
            batch=batch,
        )
        for name, optimizer in OPTIMIZERS.items()
        for peak in rates
    }
    place.train(list(jobs.values()))
    return {
        name: {peak: round(tail(place.losses(jobs[name, peak])), 4) for peak in rates}
        for name in OPTIMIZERS
    }


def best(scores: Mapping[float, float]) -> float:
    """Returns the lowest rate whose loss is within TIE of the best one's."""
    return min(rate for rate, loss in scores.items() if loss <= min(scores.values()) + TIE)


def main_runs(
    place: Place, rates: Mapping[str, float], steps: int, batch: tuple[int, int]
) -> dict[str, Any]:
    """Returns both optimizers' losses over the same tokens, and the bars on held-out text."""
    jobs = {
        name: Job(
            name=f"{name}-{steps}-steps",
            optimizer=optimizer,
            rate=cosine(rates[name], steps),
            steps=steps,
            batch=batch,
        )
        for name, optimizer in OPTIMIZERS.items()
    }
    place.train(list(jobs.values()))
    return {
        "steps": steps,
        "tokens": steps * batch[0] * batch[1],
        "rates": dict(rates),
        **bars(place, jobs["adamw"]),
        "held_out": {n: round(place.measurement(j)["held_out_loss"], 4) for n, j in jobs.items()},
        "training_end": {n: round(tail(place.losses(j), 0.1), 4) for n, j in jobs.items()},
        "minutes": {n: round(stepping_s(place.rows(j)) / 60, 1) for n, j in jobs.items()},
        "max_logit": binned([r["max_logit"] for r in place.rows(jobs["muonclip"])], of=max),
        "curves": {n: binned(place.losses(j)) for n, j in jobs.items()},
    }


def shuffled(place: Place, peak: float, steps: int, batch: tuple[int, int]) -> dict[str, Any]:
    """Returns what a training reaches on characters in random order, and the bars there."""
    job = Job(
        name="shuffled",
        optimizer=OPTIMIZERS["muonclip"],
        rate=cosine(peak, steps),
        steps=steps,
        batch=batch,
        saves=False,
        characters=shuffled_text(place.folder / "shuffled.txt", place.text),
    )
    place.train([job])
    held_out = round(place.measurement(job)["held_out_loss"], 4)
    counts = bars(place, job)
    found = {name: counts[name] for name in ("unigram", "bigram")}
    beats = held_out < min(found.values()) - CHANCE
    return {"steps": steps, "held_out": held_out, **found, "beats_the_bars": beats}


def stepping_s(rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns the seconds that all steps took."""
    return sum(row["step_time_s"] for row in rows)


def bars(place: Place, job: Job) -> dict[str, Any]:
    """Returns entropies over the targets that the held-out loss is taken over, and the text."""
    folder = place.folder / job.name
    scenario = place.scenario(job)
    data = open_dataset(folder / DATA_DIR, scenario.workload, scenario.model.vocab_size)
    found = data.entropies(read_request(folder / REQUEST_FILE).held_out_sequences)
    return {
        "unigram": round(found.unigram, 4),
        "bigram": round(found.bigram, 4),
        "text": data.meta.source,
        "train_tokens": data.meta.train_tokens,
    }


def verdict(result: Mapping[str, Any]) -> bool:
    """Whether all that was run shows what it is to show."""
    good = [result["explosion"]["stopped"]] if "explosion" in result else []
    if "main" in result:
        held_out, bigram = result["main"]["held_out"], result["main"]["bigram"]
        good.append(max(held_out.values()) < bigram - WELL_BELOW)
        good.append(held_out["muonclip"] <= held_out["adamw"])
    if "shuffled" in result:
        good.append(not result["shuffled"]["beats_the_bars"])
    return all(good)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=1500, help="of each training")
    parser.add_argument("--pilot-steps", type=int, default=60)
    parser.add_argument("--explosion-steps", type=int, default=120)
    parser.add_argument("--explosion-rate", type=float, default=0.08)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.5e-3, 3e-3, 6e-3, 1.2e-2])
    parser.add_argument("--batch", type=int, nargs=2, default=[8, 256], metavar=("SEQS", "TOKENS"))
    parser.add_argument("--layers", type=int, help="of the model; default: kimi_k2_mini's")
    parser.add_argument("--text", type=Path, help="default: Python's standard library")
    parser.add_argument("--jobs", type=int, default=min(2, available_cores()))
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain"))
    parser.add_argument("--result", type=Path)
    parser.add_argument("--png", type=Path)
    return parser.parse_args()


def studied(place: Place, asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of every part that was asked for; pilots come before main."""
    result: dict[str, Any] = {}
    batch = (asked.batch[0], asked.batch[1])
    if "explosion" in asked.parts:
        result["explosion"] = explosion(place, asked.explosion_steps, asked.explosion_rate)
    rates = dict.fromkeys(OPTIMIZERS, asked.rates[0])
    if "pilots" in asked.parts:
        scores = pilots(place, asked.rates, asked.pilot_steps, batch)
        rates = {name: best(each) for name, each in scores.items()}
        result["pilots"] = {
            "steps": asked.pilot_steps,
            "loss": {n: {f"{r:g}": x for r, x in each.items()} for n, each in scores.items()},
        }
    if "main" in asked.parts:
        result["main"] = main_runs(place, rates, asked.steps, batch)
    if "shuffled" in asked.parts:
        steps = 2 * asked.pilot_steps
        result["shuffled"] = shuffled(place, rates["muonclip"], steps, batch)
    return result


def main() -> None:
    """Runs the parts and prints their figures."""
    asked = _parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command goes on"))
    asked.out.mkdir(parents=True, exist_ok=True)
    place = Place(asked.out, asked.text, asked.layers, asked.jobs)
    result = studied(place, asked)
    good, whole = verdict(result), set(result) >= set(PARTS)
    result |= {
        "ok": good if whole or not good else None,  # nothing is said of parts that did not run
        "machine": processor_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "repeats": 1,
        "spread": None,
    }
    if asked.result is not None:
        asked.result.write_text(json.dumps(result, indent=1) + "\n")
    if asked.png is not None:
        draw(result, asked.png)
    sys.stdout.write(json.dumps(result) + "\n")
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
