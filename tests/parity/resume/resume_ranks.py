"""One rank of the check that a run goes on where it was, under every plan of a world size.

    torchrun --nproc-per-node=N resume_ranks.py FOLDER [--only BEGIN]

Nothing here may unpickle: what would is replaced before torch is imported. Rank 0 writes
FOLDER/report-N.json.
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
import json
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "same_numbers"))
from same_cases import dataset, scenario
from same_plans import MICRO_BATCH, Row, chosen
from saved_trial import save_checkpoint

from flopwright.executor.checkpoint.boxes import whole
from flopwright.executor.checkpoint.load import load_into
from flopwright.executor.checkpoint.manifest import Manifest, read_manifest
from flopwright.executor.data.tokenizer import train_characters
from flopwright.executor.launch.request import RunEntry
from flopwright.executor.parallel.groups import GroupRegistry
from flopwright.executor.train.saved_state import load_state
from flopwright.executor.train.trial import Trial, start_trial
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import make_plan_file
from flopwright.spec.workload import Precision

SAVED, END = 2, 4  # steps
NARROW = (
    Row("bf16 dp2 zero1", "", {"dp_shard": 2, "zero_stage": 1}),
    Row("bf16 dp2 zero2 muonclip", "", {"dp_shard": 2, "zero_stage": 2}, "k2", "muonclip"),
    Row("bf16 dp2 zero3 llama", "", {"dp_shard": 2, "zero_stage": 3}, "llama"),
    Row("bf16 fsdp2 zero3", "", {"dp_shard": 2, "zero_stage": 3, "data_parallel": "fsdp2"}),
    Row("bf16 dp2 ep2", "", {"dp_shard": 2, "ep": 2}),
    Row("bf16 single", ""),
)
QUICK = {
    "single", "single muonclip", "dp2 zero1", "dp2 zero2", "dp2 ep2 zero1", "fsdp2 zero3",
    "pp2 zb_v", "tp2", "cp2 ring", "bf16 single", "bf16 dp2 zero1", "bf16 fsdp2 zero3",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A plan in one format."""

    row: Row
    dtype: str
    registry: GroupRegistry
    folder: Path

    def start(self) -> Trial:
        """Returns a trial with its first weights."""
        row, ranks = self.row, self.row.world_size
        spec = scenario(row.model, row.optimizer, "fp32" if self.narrow else self.dtype, ranks)
        if self.narrow:
            workload = spec.workload.model_copy(update={"precision": Precision()})
            spec = spec.model_copy(update={"workload": workload})
        plan = ParallelPlan(micro_batch_size=MICRO_BATCH, **row.plan)
        entry = RunEntry(name="x", plan=make_plan_file(spec, plan, "x"))
        data = dataset(spec.workload)
        device = torch.device("cpu")
        return start_trial(entry, spec.workload, data, self.registry, device)

    @property
    def narrow(self) -> bool:
        """Whether weights have master copies."""
        return self.dtype == "bf16"

    @property
    def base(self) -> Path:
        """Where the single process's checkpoints of the same training stand."""
        row = self.row
        return self.folder / f"base-{row.model}-{row.optimizer}-{self.dtype}"


def train(trial: Trial, first: int, end: int) -> list[float]:
    """Makes steps first .. end; returns this rank's losses."""
    records = [trial.run_step(step) for step in range(first, end)]
    return [float(r.loss) for r in records if r.loss is not None]


def check(case: Case) -> dict[str, Any]:
    """Returns what differs between going on and not having stopped."""
    own = case.folder / f"{case.row.name} {case.dtype}".replace(" ", "-")
    trial = case.start()
    train(trial, 0, SAVED)
    saved = save_checkpoint(trial, own / "a", case.folder, SAVED)
    losses = train(trial, SAVED, END)
    end = save_checkpoint(trial, own / "a", case.folder, END)
    load_state(trial, saved, read_manifest(saved))  # as after a loss spike
    back = train(trial, SAVED, END) == losses
    returned = save_checkpoint(trial, own / "d", case.folder, END)
    again = case.start()
    load_state(again, saved, read_manifest(saved))
    same = train(again, SAVED, END) == losses
    resumed = save_checkpoint(again, own / "b", case.folder, END)
    record: dict[str, Any] = {"plan": case.row.name, "dtype": case.dtype}
    record["same_losses"] = bool(_all(same and back))
    if dist.get_rank() == 0:
        record["differing"] = differing(read_manifest(end), read_manifest(resumed))
        record["differing_back"] = differing(read_manifest(end), read_manifest(returned))
    if case.row.name in {"single", "single llama", "single muonclip", "bf16 single"}:
        for step in (SAVED, END):
            target = case.base / f"step-{step:08d}"
            target.parent.mkdir(exist_ok=True)
            (saved if step == SAVED else end).rename(target)
    elif case.base.is_dir() and not case.narrow:  # bf16 would choose other experts
        other = case.start()
        load_state(other, case.base / saved.name, read_manifest(case.base / saved.name))
        train(other, SAVED, END)
        moved = save_checkpoint(other, own / "c", case.folder, END)
        if dist.get_rank() == 0:
            record["far"] = far(case.base / end.name, moved)
    return record


def differing(one: Manifest, other: Manifest) -> list[str]:
    """Returns the tensors and numbers that are not equal to the bit."""
    sums = [
        {(f.file, k): p.crc32 for f in m.files for k, p in f.pieces.items()} for m in (one, other)
    ]
    assert sums[0].keys() == sums[1].keys()
    names = [str(key) for key, crc in sums[0].items() if sums[1][key] != crc]
    return names + ([] if one.scalars() == other.scalars() else ["scalars"])


def far(one: Path, other: Path) -> tuple[float, str]:
    """Returns the largest relative difference of a tensor, by norm, and the tensor."""
    worst = (0.0, "")
    mine, theirs = _tensors(one), _tensors(other)
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    for name, tensor in mine.items():
        difference = float((tensor.double() - theirs[name].double()).norm())
        worst = max(worst, (difference / max(float(tensor.double().norm()), 1e-12), name))
    assert read_manifest(one).scalars() == read_manifest(other).scalars()
    return worst


def _tensors(where: Path) -> dict[str, torch.Tensor]:
    manifest = read_manifest(where)
    found = {
        n: torch.empty(e.shape, dtype=getattr(torch, e.dtype))
        for n, e in manifest.tensors().items()
    }
    load_into(where, manifest, {n: [whole(t)] for n, t in found.items()})
    return found


def _all(flag: bool) -> bool:
    count = torch.tensor([float(flag)])
    dist.all_reduce(count)
    return int(count) == dist.get_world_size()


def main() -> None:
    """Runs the rows of this world size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    world, registry = dist.get_world_size(), GroupRegistry()
    if dist.get_rank() == 0:
        tokenizer = train_characters(["abc"], 64).to_json()
        (parsed.folder / "tokenizer.json").write_text(tokenizer)
    dist.barrier()
    rows = [
        (row, "fp64" if "a" in row.modes else "fp32") for row, _ in chosen(world, everything=False)
    ]
    rows += [
        (row, "fp32") for row, dtype in rows if row.name.startswith("single") and dtype == "fp64"
    ]
    rows += [(row, "bf16") for row in NARROW if row.world_size == world]
    records = []
    for row, dtype in rows:
        if row.name.startswith(parsed.only) and (row.name in QUICK or not parsed.quick):
            case = Case(replace(row), dtype, registry, parsed.folder)
            records.append(check(case))
            if dist.get_rank() == 0:
                print(json.dumps(records[-1]), flush=True)
    if dist.get_rank() == 0:
        (parsed.folder / f"report-{world}.json").write_text(json.dumps(records, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
