"""Kills a training again and again, and compares its weights with those of one left alone.

    python benchmarks/kill_resume.py [--kills N] [--seed S] [--out RESULT.json]

Every kill is SIGKILL: of a rank at a random moment, of a rank inside a checkpoint (half of a
file written; files but no manifest; manifest but no name; name but older steps not removed), of
rank 0 while it prepares the data, and of the launcher. Each time the run goes on with `flopwright
run --resume`. Same plan, world size, threads and machine, deterministic algorithms. The last
line is JSON: kills, survived, bit_identical.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from flopwright.executor.checkpoint.load import load_full
from flopwright.executor.launch.resume import recorded_losses
from flopwright.executor.measure.fingerprint import processor_name
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file

ROOT: Final = Path(__file__).parents[1]
STEPS: Final = 60
EVERY: Final = 3
NAME: Final = "killed"
# Where a rank kills itself, by kind: how many of fifty.
INSIDE: Final = ("half_file", "no_manifest", "no_name", "not_pruned")
SHARES: Final = {
    "half_file": 5, "no_manifest": 5, "no_name": 5, "not_pruned": 2, "rank": 18, "data": 5,
    "launcher": 10,
}  # fmt: skip

# Python runs a module of this name at its start. KILL is "KIND:RANK:COUNT": that rank dies when
# it comes by that place for the COUNT-th time, or (kind "rank") in its COUNT-th step.
HOOK: Final = """
import os, signal
kind, rank, count = os.environ.get("KILL", "::").split(":")
if kind and os.environ.get("RANK") == rank and os.environ.get("TORCHELASTIC_RUN_ID"):
    import flopwright.executor.checkpoint.save as save
    import flopwright.executor.checkpoint.storage as storage
    import flopwright.executor.data.prepare as prepare
    import flopwright.executor.train.trial as trial
    left = [int(count)]

    def dies(function, before=None):
        def replaced(*args, **options):
            left[0] -= 1
            if left[0] == 0:
                if before:
                    before(*args, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)
        return replaced

    def half(tensors, path):
        whole(tensors, path)
        os.truncate(path, os.path.getsize(path) // 2)

    whole = storage.save_file
    if kind == "half_file":
        storage.save_file = dies(whole, half)
    elif kind == "no_manifest":
        save.manifest_text = dies(save.manifest_text)
    elif kind == "no_name":
        rename = type(save.Path()).rename
        def renamed(self, target):
            if str(target).rsplit("/", 1)[-1].startswith("step-"):
                return killing(self, target)
            return rename(self, target)
        killing = dies(rename)
        type(save.Path()).rename = renamed
    elif kind == "not_pruned":
        save.prune = dies(save.prune)
    elif kind == "data":
        prepare.split_documents = dies(prepare.split_documents)
    else:
        trial.Trial.run_step = dies(trial.Trial.run_step)
"""


@dataclass(frozen=True)
class Kill:
    """One kill: of which kind, of which rank, at which passing of its place."""

    kind: str
    rank: int
    count: int

    @property
    def text(self) -> str:
        """As the hook reads it; the launcher is killed from outside."""
        return "" if self.kind == "launcher" else f"{self.kind}:{self.rank}:{self.count}"


@dataclass(frozen=True)
class Place:
    """The plan and text that every run uses, and where runs stand."""

    folder: Path
    plan: Path
    text: Path

    def start(self, out: str, kill: Kill | None = None) -> subprocess.Popen[bytes]:
        """Starts or goes on with the run in folder `out`."""
        command = [sys.executable, "-m", "flopwright", "run", str(self.plan), "--no-store"]
        command += ["--out", str(self.folder / out), "--resume", "--deterministic"]
        command += ["--text", str(self.text), "--tokenizer", "characters", "--nproc", "2"]
        command += ["--checkpoint-every", str(EVERY), "--json", "--name", NAME]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FLOPWRIGHT_HOME": str(self.folder / f"home-{out}"),
            "PYTHONPATH": str(self.folder / "hook"),
            "KILL": "" if kill is None else kill.text,
        }
        with (self.folder / f"log-{out}").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)


def prepared(folder: Path) -> Place:
    """Returns the place, its files written: a small K2 under ZeRO-1 on two ranks."""
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    attention = scenario.model.attention
    model = scenario.model.model_copy(
        update={"num_layers": 2, "vocab_size": 128, "attention": attention}
    )
    workload = scenario.workload.model_copy(
        update={"seq_len": 32, "global_batch_size": 8, "total_tokens": 32 * 8 * STEPS}
    )
    scenario = scenario.model_copy(update={"workload": workload, "model": model})
    plan = ParallelPlan(dp_shard=2, micro_batch_size=2, zero_stage=1)
    place = Place(folder, folder / "plan.yaml", ROOT / "LICENSE")
    place.plan.write_text(dump_yaml(make_plan_file(scenario, plan, NAME)))
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    return place


def planned_kills(count: int, rng: random.Random) -> list[Kill]:
    """Returns so many kills, of every kind about its share, in random order."""
    kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
    if count < len(kinds):  # the hardest first
        first = ["no_name", "half_file", "launcher", "no_manifest", "rank", "data", "not_pruned"]
        kinds = (first * count)[:count]
    while len(kinds) < count:
        kinds.append(rng.choice(list(SHARES)))
    rng.shuffle(kinds)
    return [
        Kill(
            kind,
            rng.randrange(2) if kind in {"rank", "half_file"} else 0,
            1 if kind == "data" else rng.randint(1, 9) if kind == "rank" else rng.randint(1, 3),
        )
        for kind in kinds
    ]


def weights_sha256(out: Path) -> str:
    """Returns the sha256 over the names and bits of the run's last weights."""
    weights, manifest = load_full(out / f"checkpoint-{NAME}")
    assert manifest.step == STEPS, manifest.step
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].numpy().tobytes())
    return digest.hexdigest()


def strike(place: Place, out: str, kill: Kill, rng: random.Random) -> bool:
    """Goes on with the run until it is killed; returns whether it was before it ended."""
    process = place.start(out, kill)
    if kill.kind == "launcher":
        steps = place.folder / out / "steps.jsonl"
        before = steps.stat().st_size if steps.exists() else 0
        while process.poll() is None and (not steps.exists() or steps.stat().st_size <= before):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        if process.poll() is not None:
            return False
        process.kill()
        process.wait()
        return True
    return process.wait() != 0


def campaign(place: Place, kills: Sequence[Kill], rng: random.Random) -> dict[str, Any]:
    """Returns what came of all kills; a run that ends before its kill is followed by a new one."""
    alone = place.start("alone")
    assert alone.wait() == 0, (place.folder / "log-alone").read_text()[-3000:]
    wanted, losses = weights_sha256(place.folder / "alone"), _losses(place.folder / "alone")
    done, number, ends = Counter[str](), 0, []
    for kill in kills:
        if kill.kind == "data":  # the data is prepared at a run's start alone
            ends.append(_finish(place, f"run-{number}"))
            number += 1
        while not strike(place, f"run-{number}", kill, rng):
            ends.append(_finish(place, f"run-{number}"))
            number += 1
        done[kill.kind] += 1
    ends.append(_finish(place, f"run-{number}"))
    good = [end == (wanted, losses) for end in ends if end is not None]
    return {
        "kills": sum(done.values()),
        "by_kind": dict(done),
        "survived": sum(done.values()) if all(end is not None for end in ends) else 0,
        "runs": len(good),
        "bit_identical": all(good),
        "sha256": wanted,
    }


def _finish(place: Place, out: str) -> tuple[str, list[float]] | None:
    """Lets a run come to its end; returns its weights' sha256 and its losses."""
    if place.start(out).wait() != 0:
        sys.stderr.write((place.folder / f"log-{out}").read_text()[-3000:])
        return None
    return weights_sha256(place.folder / out), _losses(place.folder / out)


def _losses(out: Path) -> list[float]:
    return recorded_losses(out, [NAME])[NAME]


def main() -> None:
    """Runs the campaign and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args()
    rng, began = random.Random(parsed.seed), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary:
        place = prepared(Path(temporary))
        result = campaign(place, planned_kills(parsed.kills, rng), rng)
    result |= {
        "machine": processor_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "repeats": 1,
        "spread": None,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if parsed.out is not None:
        parsed.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(json.dumps(result) + "\n")
    if not (result["bit_identical"] and result["survived"] == result["kills"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
