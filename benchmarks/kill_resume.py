"""Kills a training again and again, and compares its weights with those of one left alone.

    python benchmarks/kill_resume.py [--kills N] [--seed S] [--out RESULT.json] [--seconds T]

Every kill is SIGKILL: of a rank at a random moment, of a rank inside a checkpoint (half of a
file written; files but no manifest; manifest but no name; name but older steps not removed), of
rank 0 while it prepares the data, of the process that reads a rank's data ahead, and of the
launcher. Each time the run goes on with `flopwright run --resume`. Same plan, world size, threads
and machine, deterministic algorithms: the last weights' sha256 and every loss are those of the run
left alone. Further runs change plan and world size at each kill; their losses are compared too.

Runs of about five kills are independent of each other. With --out what the file has already is
kept and only what is missing is run, for about T seconds, so that a campaign may take several
sittings. Processes are forks of one that has imported everything (warm_starts.py), or, with
--cold, new programs. The last line is JSON: kills, survived, bit_identical.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import kill_hook
import warm_starts
from kill_plan import FIRST, PLANS, Kill, Unit, moving, planned

from flopwright.executor.launch.commands import rank_environment
from flopwright.executor.launch.resume import recorded_losses
from flopwright.executor.measure.fingerprint import processor_name
from flopwright.spec.attention import MlaAttention
from flopwright.spec.load import dump_yaml, load_model, load_scenario, make_plan_file
from flopwright.spec.model import ModelSpec

ROOT: Final = Path(__file__).parents[1]
STEPS: Final = 80
EVERY: Final = 3
NAME: Final = "killed"
# Of the loss: that of parity between plans in fp32 with the same choices of experts.
MOVED_BOUND: Final = 1e-5


@dataclass(frozen=True)
class Place:
    """The plans and text that every run uses, and where runs stand."""

    folder: Path
    cold: bool

    def start(self, out: str, plan: str, kill: Kill | None = None) -> Any:
        """Starts or goes on with the run in folder `out`; returns its launcher's process."""
        ranks = str(PLANS[plan].world_size)
        arguments = ["run", str(self.folder / f"{plan}.yaml"), "--no-store"]
        arguments += ["--out", str(self.folder / out), "--resume", "--deterministic"]
        arguments += ["--text", str(ROOT / "LICENSE"), "--tokenizer", "characters"]
        arguments += ["--nproc", ranks, "--checkpoint-every", str(EVERY), "--json"]
        arguments += ["--name", NAME, "--prefetch", "2"]
        environment = {
            **os.environ,
            "FLOPWRIGHT_HOME": str(self.folder / f"home-{out}"),
            "PYTHONPATH": str(self.folder / "hook"),
            "KILL": ":::" if kill is None else kill.text,
        }
        with (self.folder / f"log-{out}").open("ab") as log:
            if not self.cold:
                return warm_starts.start_run(arguments, environment, log, ROOT, kill_hook.install)
            command = [sys.executable, "-m", "flopwright", *arguments]
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)


def small_k2() -> ModelSpec:
    """Returns a K2 of two layers, one of them with experts, whose step takes little time."""
    model = load_model("kimi_k2_mini")
    assert isinstance(model.attention, MlaAttention)
    assert model.moe is not None
    sizes = {"num_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32}
    experts = {"num_experts": 4, "top_k": 2, "expert_intermediate_size": 32}
    return model.model_copy(
        update={
            "num_layers": 2,
            "vocab_size": 128,
            "hidden_size": 64,
            "attention": model.attention.model_copy(update=sizes),
            "mlp": model.mlp.model_copy(update={"intermediate_size": 96}),
            "moe": model.moe.model_copy(update=experts),
        }
    )


def prepared(folder: Path, *, cold: bool) -> Place:
    """Returns the place, its files written: a small K2 under several plans."""
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    workload = scenario.workload.model_copy(
        update={"seq_len": 16, "global_batch_size": 4, "total_tokens": 16 * 4 * STEPS}
    )
    scenario = scenario.model_copy(update={"workload": workload, "model": small_k2()})
    for name, plan in PLANS.items():
        text = dump_yaml(make_plan_file(scenario, plan, NAME))
        (folder / f"{name}.yaml").write_text(text)
    (folder / "hook").mkdir()
    hook = f"import sys\nsys.path.append({str(ROOT / 'benchmarks')!r})\n"
    hook += "import os\nif os.environ.get('KILL', ':::') != ':::':\n"
    hook += "    import kill_hook\n    kill_hook.install()\n"
    (folder / "hook" / "sitecustomize.py").write_text(hook)
    return Place(folder, cold)


def weights_sha256(out: Path) -> str:
    """Returns the sha256 over the names and bits of the run's last weights."""
    from flopwright.executor.checkpoint.load import load_full

    weights, manifest = load_full(out / f"checkpoint-{NAME}")
    assert manifest.step == STEPS, manifest.step
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].numpy().tobytes())
    return digest.hexdigest()


def strike(place: Place, out: str, plan: str, kill: Kill) -> bool:
    """Goes on with the run until it is killed; returns whether it was before it ended."""
    process = place.start(out, plan, kill)
    if kill.kind != "launcher":
        return bool(process.wait() != 0)
    steps = place.folder / out / "steps.jsonl"
    before = steps.stat().st_size if steps.exists() else 0
    while process.poll() is None and (not steps.exists() or steps.stat().st_size <= before):
        time.sleep(0.01)
    time.sleep(kill.delay_s)
    if process.poll() is not None:
        return False
    process.kill()
    process.wait()
    _until_ranks_ended(place.folder / out)
    return True


def _until_ranks_ended(out: Path) -> None:
    """Waits for the ranks, which end with their launcher, to be gone (Linux)."""
    for _ in range(1000):
        held = False
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                held = held or link.readlink().is_relative_to(out)
            except OSError:
                continue
        if not held:
            return
        time.sleep(0.01)


@dataclass(frozen=True)
class End:
    """How a run ended: the sha256 of its weights, and its losses."""

    sha256: str
    losses: list[float]


def finished(place: Place, out: str, plan: str) -> End | None:
    """Lets a run come to its end; None where it does not."""
    if place.start(out, plan).wait() != 0:
        sys.stderr.write((place.folder / f"log-{out}").read_text()[-3000:])
        return None
    losses = recorded_losses(place.folder / out, [NAME])[NAME]
    return End(weights_sha256(place.folder / out), losses)


def run_unit(place: Place, unit: Unit, alone: End) -> dict[str, Any]:
    """Returns what came of a run and its kills; one that ends before a kill gets a successor."""
    began, number, ends, kinds = time.perf_counter(), 0, [], list[str]()
    for i, kill in enumerate(unit.kills):
        plan, tries = unit.plan(i), 0
        while not strike(place, f"{unit.name}-{number}", plan, kill):
            ends.append(finished(place, f"{unit.name}-{number}", plan))
            number, tries = number + 1, tries + 1
            # a successor that has not begun may be too young for the kill's place
            kill = replace(kill, count=max(1, kill.count - tries))
        kinds.append(kill.kind)
    ends.append(finished(place, f"{unit.name}-{number}", unit.plan(len(unit.kills))))
    off = [_distance(end.losses, alone.losses) for end in ends if end is not None]
    return {
        "kinds": kinds,
        "runs": len(ends),
        "ended": all(end is not None for end in ends),
        "same_bits": all(end == alone for end in ends),
        "loss_off": max(off, default=None),
        "plans": list(unit.plans),
        "starts": "new programs" if place.cold else "forks",
        "seconds": round(time.perf_counter() - began, 1),
    }


def _distance(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the largest relative difference of two runs' losses; infinite if steps lack."""
    if len(mine) != len(theirs):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures over all runs so far, without the losses."""
    units = record["units"]
    stayed = [u for u in units.values() if not u["plans"]]
    moved = [u for u in units.values() if u["plans"]]
    kills = [kind for u in stayed for kind in u["kinds"]]
    figures = {
        "kills": len(kills),
        "by_kind": dict(Counter(kills)),
        "survived": sum(len(u["kinds"]) for u in stayed if u["ended"]),
        "runs": sum(u["runs"] for u in stayed),
        "bit_identical": all(u["same_bits"] for u in stayed),
        "sha256": record["alone"]["sha256"],
        "other_plans": {
            "kills": sum(len(u["kinds"]) for u in moved),
            "ended": all(u["ended"] for u in moved),
            "loss_off": max((u["loss_off"] for u in moved), default=None),
            "bound": MOVED_BOUND,
        },
        "seconds": round(sum(u["seconds"] for u in units.values()), 1),
    }
    return figures | {key: record[key] for key in ("machine", "date", "repeats", "spread")}


def campaign(place: Place, wanted: Sequence[Unit], path: Path | None, until: float) -> Any:
    """Returns the record of all runs, those that `path` has among them; written after each."""
    record = json.loads(path.read_text()) if path is not None and path.exists() else {}
    settings = {"steps": STEPS, "checkpoint_every": EVERY, "machine": processor_name()}
    if {k: record.get(k) for k in settings} != settings:
        record = {**settings, "repeats": 1, "spread": None, "units": {}}
        record["date"] = datetime.now(UTC).date().isoformat()
    if "alone" not in record:
        alone = finished(place, "alone", FIRST)
        assert alone is not None, (place.folder / "log-alone").read_text()[-3000:]
        record["alone"] = asdict(alone)
    alone = End(**record["alone"])
    for unit in wanted:
        if unit.name in record["units"] or time.perf_counter() > until:
            continue
        record["units"][unit.name] = run_unit(place, unit, alone)
        record["date"] = datetime.now(UTC).date().isoformat()
        record["summary"] = summary(record)
        if path is not None:
            path.write_text(json.dumps(record, indent=1) + "\n")
    return record


def main() -> None:
    """Runs the campaign, or what is missing of it, and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--no-moves", action="store_true", help="no runs under other plans")
    parsed = parser.parse_args()
    until = time.perf_counter() + parsed.seconds
    os.environ.update(rank_environment(os.environ, "cpu"))
    if not parsed.cold:
        warm_starts.warm()
    wanted = planned(parsed.kills, parsed.seed)
    wanted += [] if parsed.no_moves else moving(parsed.seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary:
        place = prepared(Path(temporary), cold=parsed.cold)
        record = campaign(place, wanted, parsed.out, until)
    result = summary(record)
    missing = [unit.name for unit in wanted if unit.name not in record["units"]]
    if missing:
        sys.stderr.write(f"not yet run: {', '.join(missing)}\n")
    sys.stdout.write(json.dumps(result) + "\n")
    moved = result["other_plans"]
    off = moved["loss_off"] is not None and moved["loss_off"] > MOVED_BOUND
    if not result["bit_identical"] or result["survived"] != result["kills"] or off:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
