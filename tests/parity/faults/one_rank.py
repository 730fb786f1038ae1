"""A run of one rank, as torchrun starts it, under one fault after another; in one process.

    python one_rank.py FOLDER

Nothing here may unpickle: what would is replaced before torch is imported. Writes
FOLDER/report.json, by scenario: how each start ended, what it said, and what stands then.
"""

# ruff: noqa: E402  (pickle first)
from __future__ import annotations

import pickle
from typing import Any


class Raiser:
    """What stands in the place of everything that reads pickles."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")


pickle.load = pickle.loads = pickle.Unpickler = pickle._Unpickler = Raiser  # type: ignore

import torch

torch.load = Raiser

import argparse
import contextlib
import ctypes
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch.distributed as dist

from flopwright.executor.checkpoint.load import load_full
from flopwright.executor.checkpoint.manifest import steps_of
from flopwright.executor.data.batches import Dataset
from flopwright.executor.data.tokenizer import train_characters
from flopwright.executor.launch.commands import rank_environment
from flopwright.executor.launch.resume import recorded_losses
from flopwright.executor.train import worker
from flopwright.executor.train.trial import Trial
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file

STEPS, EVERY, BATCH, VOCABULARY = 28, 4, 4, 64
SMALL_FILE_BYTES = 2**18  # a checkpoint's file is larger, all else smaller
# Python runs this at its start: in a data worker what unpickles raises, and there is no torch.
NOTHING_UNPICKLED = """
import os, pickle, sys
if "flopwright.executor.data.worker" in sys.orig_argv:
    class Raiser:
        def __init__(self, *_, **__):
            raise AssertionError("something was unpickled")
    pickle.load = pickle.loads = pickle.Unpickler = pickle._Unpickler = Raiser
    sys.modules["torch"] = None
    open(os.path.join({folder!r}, "worker-%d" % os.getpid()), "w").close()
"""


class Runs:
    """Runs in folders of their own, and what came of each start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends: list[dict[str, Any]] = []

    def start(
        self, out: str, *more: str, plan: str = "plan", steps: int = STEPS
    ) -> dict[str, Any]:
        """Starts or goes on with a run; returns its exit code and what it said."""
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(found.getsockname()[1])
        arguments = ["--plan", str(self.folder / f"{plan}.yaml"), "--out", str(self.folder / out)]
        arguments += ["--text", str(self.folder / "text.txt"), "--tokenizer", "characters"]
        arguments += ["--steps", str(steps), "--checkpoint-every", str(EVERY), "--resume", *more]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = worker.main(arguments)
        end = {"code": code, "said": said.getvalue(), "steps": steps_of(self.checkpoints(out))}
        return end | {"intact": out != "corrupt" and self.intact(out)}

    def checkpoints(self, out: str) -> Path:
        """Returns where a run's checkpoints stand."""
        return self.folder / out / "checkpoint-x"

    def intact(self, out: str) -> bool:
        """Returns whether every checkpoint of a run can be read, and nothing half-made lies by."""
        for step in steps_of(self.checkpoints(out)):
            load_full(self.checkpoints(out), step=step)
        return not list(self.checkpoints(out).glob(".tmp*"))

    def result(self, out: str) -> list[Any]:
        """Returns the sha256 of a run's last weights, and its losses."""
        weights, manifest = load_full(self.checkpoints(out))
        digest = hashlib.sha256()
        for name in sorted(weights):
            digest.update(weights[name].numpy().tobytes())
        return [manifest.step, digest.hexdigest(), recorded_losses(self.folder / out, ["x"])["x"]]

    def copy(self, out: str, to: str) -> None:
        """Copies a run's folder."""
        shutil.copytree(self.folder / out, self.folder / to)


def write_inputs(folder: Path) -> None:
    """Writes two plans of small models, and a text that is soon learnt."""
    base = load_scenario("kimi_k2_mini_2cpu_fp32")
    workload = base.workload.model_copy(
        update={"seq_len": 16, "global_batch_size": BATCH, "total_tokens": 16 * BATCH * STEPS}
    )
    for name, layers in (("plan", 2), ("foreign", 1)):
        model = base.model.model_copy(update={"num_layers": layers, "vocab_size": VOCABULARY})
        scenario = base.model_copy(update={"workload": workload, "model": model})
        (folder / f"{name}.yaml").write_text(
            dump_yaml(make_plan_file(scenario, ParallelPlan(micro_batch_size=BATCH), "x"))
        )
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 500)


@contextlib.contextmanager
def samples(change: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Lets `change` make a data set's samples from its own; see `poisoned` and `without`."""
    own = Dataset._samples
    Dataset._samples = lambda self, numbers: change(lambda n: own(self, n), numbers)  # type: ignore
    try:
        yield
    finally:
        Dataset._samples = own  # type: ignore[method-assign]


def poisoned(*steps: int) -> Any:
    """Samples whose tokens are drawn at random where they belong to these steps' batches."""

    def change(own: Any, numbers: Any) -> Any:
        rows = own(numbers).copy()
        for row, number in enumerate(numbers.tolist()):
            if number // BATCH in steps:
                rng = np.random.default_rng(number)
                rows[row] = rng.integers(20, VOCABULARY, rows.shape[1])
        return rows

    return samples(change)


def without(*steps: int) -> Any:
    """Samples of the steps' batches left out, by looking at each number."""

    def change(own: Any, numbers: Any) -> Any:
        kept = [n for n in range(BATCH * (STEPS + len(steps))) if n // BATCH not in steps]
        return own(np.array([kept[n] for n in numbers.tolist()]))

    return samples(change)


@contextlib.contextmanager
def in_step(step: int, act: Callable[[Trial], object], *, behind: bool = False) -> Iterator[None]:
    """Calls `act` when step `step` begins, or behind it."""
    run_step = Trial.run_step

    def acting(self: Trial, at: int, **options: Any) -> Any:
        if at == step and not behind:
            act(self)
        record = run_step(self, at, **options)
        if at == step and behind:
            act(self)
        return record

    Trial.run_step = acting  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trial.run_step = run_step  # type: ignore[method-assign]


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond SMALL_FILE_BYTES, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Lets nobody write to a folder; root neither (Linux)."""
    mode = folder.stat().st_mode
    folder.chmod(0o555)
    override(allowed=False)
    try:
        yield
    finally:
        override(allowed=True)
        folder.chmod(mode)


def override(*, allowed: bool) -> None:
    """Gives or takes root's right to write where the mode forbids it; others have none."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3; this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    assert libc.capget(header, sets) == 0
    bit = 1 << 1  # CAP_DAC_OVERRIDE
    sets[0] = sets[0] | bit if allowed else sets[0] & ~bit
    assert libc.capset(header, sets) == 0


def spikes(runs: Runs) -> dict[str, Any]:
    """Poison in the data: gone back from, and given up where there is too much of it."""
    found: dict[str, Any] = {}
    with poisoned(18):
        found["recovers"] = runs.start("poisoned", "--max-rollbacks", "2")
        found["poisoned"] = runs.result("poisoned")
        lines = (runs.folder / "poisoned" / "rollbacks.jsonl").read_text().splitlines()
        found["rollbacks"] = [json.loads(line) for line in lines]
    with without(17, 18):
        found["clean"] = runs.start("clean")["code"]
        found["expected"] = runs.result("clean")
    with poisoned(18):  # a run that was killed behind the rollback knows what to leave out
        runs.copy("poisoned", "again")
        shutil.rmtree(runs.checkpoints("again") / "step-00000028")
        (runs.folder / "again" / "measurement-x.json").unlink()
        found["left"] = steps_of(runs.checkpoints("again"))
        found["resumed"] = runs.start("again", "--max-rollbacks", "2")
        found["again"] = runs.result("again")
    with poisoned(18, 24):
        found["too much"] = runs.start("much", "--max-rollbacks", "1")
    return found


def no_numbers(runs: Runs) -> dict[str, Any]:
    """Weights that are no numbers: the loss of the step is none either, and none is saved."""
    found: dict[str, Any] = {}
    with in_step(10, spoil):
        found["ends"] = runs.start("spoilt")
    found["saved"] = all(
        bool(torch.isfinite(tensor).all())
        for step in steps_of(runs.checkpoints("spoilt"))
        for tensor in load_full(runs.checkpoints("spoilt"), step=step)[0].values()
        if tensor.is_floating_point()
    )
    found["again"] = runs.start("spoilt")
    found["result"] = runs.result("spoilt")
    times = iter([1])
    with in_step(18, lambda trial: [spoil(trial) for _ in times]):  # the first time alone
        found["recovers"] = runs.start("once", "--max-rollbacks", "1")
    found["recovered"] = runs.result("once")
    with in_step(11, spoil, behind=True):  # as an update may that runs over
        found["update"] = runs.start("update", steps=16)
    times = iter([1])
    with in_step(19, lambda trial: [spoil(trial) for _ in times], behind=True):
        found["update recovers"] = runs.start("update once", "--max-rollbacks", "1", steps=24)
    return found


def spoil(trial: Trial) -> None:
    """Makes all weights NaN."""
    for weight in trial.trainable.parameters.values():
        weight.data.fill_(float("nan"))


def read_ahead(runs: Runs) -> dict[str, Any]:
    """A data worker in which nothing may be unpickled, nor torch be imported at all."""
    site = runs.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NOTHING_UNPICKLED.format(folder=str(site)))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), before]))
    try:
        found: dict[str, Any] = {"end": runs.start("ahead", "--prefetch", "2", steps=8)}
    finally:
        del os.environ["PYTHONPATH"]
        os.environ.update({} if before is None else {"PYTHONPATH": before})
    found["workers"] = len(list(site.glob("worker-*")))
    found["losses"] = runs.result("ahead")[2]
    return found


def stops(runs: Runs) -> dict[str, Any]:
    """SIGTERM, and the file that stands for it, in the middle of a round."""
    found: dict[str, Any] = {}
    with in_step(2, lambda _: found.update(limits_s=limits_s())):
        found["whole run"] = runs.start("whole", "--collective-timeout", "50")
    found["whole"] = runs.result("whole")
    told = {
        "SIGTERM": lambda _: os.kill(os.getpid(), signal.SIGTERM),
        "file": lambda _: (runs.folder / "file" / "stop-now").touch(),
    }
    for name, tell in told.items():
        with in_step(9, tell):
            found[name] = runs.start(name)
        found[f"{name} record"] = json.loads((runs.folder / name / "stopped.json").read_text())
        found[f"{name} steps"] = len(recorded_losses(runs.folder / name, ["x"])["x"])
    found["again"] = runs.start("SIGTERM")["code"]
    found["result"] = runs.result("SIGTERM")
    before = tree(runs.folder / "whole" / "checkpoint-x")
    found["done"] = runs.start("whole")
    found["done changes nothing"] = tree(runs.folder / "whole" / "checkpoint-x") == before
    return found


def limits_s() -> list[float]:
    """Returns the time limit of every process group there is, seconds."""
    groups = dist.distributed_c10d._world.pg_map
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def tree(folder: Path) -> dict[str, str]:
    """Returns the sha256 of the files in a folder by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def storage(runs: Runs) -> dict[str, Any]:
    """A disk that is full, a folder that may not be written, and what lies in the way."""
    found: dict[str, Any] = {"half": runs.start("half", steps=8)}
    with small_files():
        found["full"] = runs.start("half")
    with read_only(runs.checkpoints("half")):
        found["read-only"] = runs.start("half")
    before = tree(runs.checkpoints("half"))
    for name, damage in damages(runs).items():
        runs.copy("half", name)
        damage(runs.folder / name)
        found[name] = runs.start(name) | {"changed": changed(runs, name, before)}
    found["half again"] = runs.start("half")
    found["result"] = runs.result("half")
    # killed after its last checkpoint, before what it showed was written
    (runs.folder / "half" / "measurement-x.json").unlink()
    found["unmeasured"] = runs.start("half")
    found["measured"] = runs.result("half")
    return found


def changed(runs: Runs, out: str, before: dict[str, str]) -> list[str]:
    """Returns the files of a run's checkpoints that are not as they were in the run copied."""
    now = tree(runs.checkpoints(out))
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def damages(runs: Runs) -> dict[str, Callable[[Path], None]]:
    """Returns what is done to a copy of a run that stands at step 8, by name."""

    def last(folder: Path) -> Path:
        return folder / "checkpoint-x" / "step-00000008"

    def corrupt(folder: Path) -> None:
        shard = last(folder) / "rank-00000.safetensors"
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    def foreign(folder: Path) -> None:
        assert runs.start("other", plan="foreign", steps=8)["code"] == 0
        shutil.rmtree(last(folder))
        shutil.copytree(runs.checkpoints("other") / "step-00000008", last(folder))

    def tokenizer(folder: Path) -> None:
        other = train_characters(["zyxwv"], VOCABULARY).to_json()
        for path in (folder / "data").rglob("tokenizer.json"):
            path.unlink()  # it may be a name of the cache's file
            path.write_text(other)

    def own_tokenizer(folder: Path) -> None:
        (last(folder) / "tokenizer.json").write_text("{}")

    def request(folder: Path) -> None:
        (folder / "request.json").write_text("{")

    return {
        "corrupt": corrupt,
        "foreign": foreign,
        "tokenizer": tokenizer,
        "own tokenizer": own_tokenizer,
        "request": request,
    }


def main() -> None:
    """Runs every scenario."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(rank_environment(os.environ, "cpu") | alone)
    os.environ["FLOPWRIGHT_HOME"] = str(folder / "home")
    write_inputs(folder)
    runs = Runs(folder)
    report = {"stops": stops(runs), "storage": storage(runs), "spikes": spikes(runs)}
    report |= {"no numbers": no_numbers(runs), "ahead": read_ahead(runs)}
    (folder / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
