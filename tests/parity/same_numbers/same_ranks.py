"""One rank of the comparison: every plan of a world size, one after the other.

    torchrun --nproc-per-node=N same_ranks.py REFERENCES OUT [--everything] [--long] [--only BEGIN]

Rank 0 writes OUT/report-N.json: a record a plan and mode with the largest differences.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from same_cases import MODELS, dataset, scenario
from same_plans import (
    FREE_STEPS,
    MICRO_BATCH,
    QUICK_STEPS,
    STEPS,
    Row,
    chosen,
    is_brief,
)
from same_reference import reference_file
from saved_trial import save_checkpoint
from torch import Tensor

from flopwright.executor.checkpoint.load import load_full
from flopwright.executor.data.tokenizer import train_characters
from flopwright.executor.launch.request import RunEntry
from flopwright.executor.launch.supported import unsupported
from flopwright.executor.parallel.groups import GroupRegistry, gather_bytes
from flopwright.executor.train.trial import Trial, start_trial
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.spec.load import make_plan_file

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Reference:
    """What the single process left."""

    losses: Any
    weights: dict[str, dict[str, Any]]  # by number of steps
    choices: Tensor | None
    scores: Tensor | None


def read_reference(folder: Path, row: Row, dtype: str) -> Reference:
    """Returns the reference of a row."""
    with np.load(reference_file(folder, row.model, row.optimizer, dtype)) as file:
        found = dict(file)
    return Reference(
        found["losses"],
        {
            steps: {
                n.removeprefix(f"{steps}/"): w
                for n, w in found.items()
                if n.startswith(f"{steps}/")
            }
            for steps in (str(QUICK_STEPS), str(STEPS))
        },
        torch.from_numpy(found["choices"]).long() if "choices" in found else None,
        torch.from_numpy(found["scores"]) if "scores" in found else None,
    )


class Routing:
    """Stands around each forward pass: replays the reference's choices, or notes its own.

    Attributes:
        differing: (step, micro-batch, layer's place, gap in the reference's scores) of tokens
            whose choice is not the reference's.
    """

    def __init__(self, trial: Trial, reference: Reference, *, replay: bool) -> None:
        self._trial, self._reference, self._replay = trial, reference, replay
        self._inner = trial.runner.parts.around
        self._rows = own_rows(trial)
        moe = MODELS[trial.entry.plan.scenario.model.name].moe
        assert moe is not None
        self._first = moe.first_dense_layers
        self.step = 0
        self.differing: list[tuple[int, int, int, float]] = []

    @contextmanager
    def forward(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Sets the choices of a forward pass before it, or compares its own after it."""
        groups, plan = self._trial.groups, self._trial.plan
        place = microbatch * plan.dp + groups.coordinates["dp"]  # in the global batch
        blocks = self._trial.chunks[chunk].moe_blocks()
        assert self._reference.choices is not None
        theirs = self._reference.choices[self.step, place]
        for number, block in blocks.items():
            rows = theirs[number - self._first][self._rows]
            block.routing_replay = rows if self._replay else None
        with self._inner.forward(chunk, microbatch):
            yield
        for number, block in blocks.items():
            if not self._replay:
                self._compare(place, number - self._first, block.last_choices)

    def backward(self, chunk: int, microbatch: int) -> Any:
        """Returns what the plan's own store enters."""
        return self._inner.backward(chunk, microbatch)

    def _compare(self, place: int, layer: int, mine: Tensor | None) -> None:
        assert mine is not None
        assert self._reference.choices is not None
        assert self._reference.scores is not None
        theirs = self._reference.choices[self.step, place, layer][self._rows]
        scores = self._reference.scores[self.step, place, layer][self._rows]
        for token in range(len(mine)):
            own, other = set(mine[token].tolist()), set(theirs[token].tolist())
            if own != other:
                taken = min(float(scores[token, e]) for e in other - own)
                given = min(float(scores[token, e]) for e in own - other)
                self.differing.append((self.step, place, layer, taken - given))


def own_rows(trial: Trial) -> Tensor:
    """Returns which of a micro-batch's tokens this rank routes, in its order."""
    seq = trial.workload.seq_len
    rows = torch.arange(MICRO_BATCH * seq).view(MICRO_BATCH, seq)
    rows = trial.sharing.own_tokens(rows)
    if trial.plan.tp > 1 and trial.plan.sequence_parallel:
        rows = rows.chunk(trial.plan.tp, 1)[trial.groups.tp.index]
    return rows.reshape(-1)


def compare(
    row: Row, mode: str, steps: int, folders: tuple[Path, Path], registry: GroupRegistry
) -> Any:
    """Trains one plan in one mode for so many steps; returns its record."""
    dtype = "fp64" if mode == "a" else "fp32"
    reference = read_reference(folders[0], row, dtype)
    spec = scenario(row.model, row.optimizer, dtype, row.world_size)
    plan = ParallelPlan(micro_batch_size=MICRO_BATCH, **row.plan)
    name = f"{row.name} {mode}".replace(" ", "-")
    entry = RunEntry(name=name, plan=make_plan_file(spec, plan, name))
    violations = [*plan_violations(plan, spec), *unsupported(entry.plan)]
    assert not violations, (row.name, violations)
    began = time.perf_counter()
    trial = start_trial(entry, spec.workload, dataset(spec.workload), registry, CPU)
    routed = reference.choices is not None
    routing = Routing(trial, reference, replay=mode == "b") if routed else None
    if routing is not None and mode != "a":
        trial.runner.parts = replace(trial.runner.parts, around=routing)
    losses = torch.zeros(steps, dtype=torch.float64)
    for step in range(steps):
        if routing is not None:
            routing.step = step
        record = trial.run_step(step)
        assert trial.runner.log == list(trial.runner.actions)
        if record.loss is not None:
            losses[step] = record.loss.double()
    losses = mean_losses(trial, losses)
    theirs = torch.from_numpy(reference.losses[:steps])
    out: dict[str, Any] = {
        "plan": row.name,
        "mode": mode,
        "world_size": row.world_size,
        "steps": steps,
        "loss": float(((losses - theirs) / theirs).abs().max()),
    }
    if mode != "c":
        differences = weights_differences(trial, reference, steps, folders[1])
        moe = spec.model.moe
        if mode == "b" and moe is not None and moe.balance == "quantile":
            # A histogram's bins are steps: a score that crosses an edge moves its bias by more.
            apart = {n for n in differences if n.endswith("e_score_correction_bias")}
            out["biases"] = max(differences.pop(n) for n in apart)
        out["worst"] = max(differences, key=lambda n: differences[n])
        out["weights"] = differences[out["worst"]]
    elif routing is not None:
        out["differing"] = first_differing(trial, routing)
    out["seconds"] = time.perf_counter() - began
    return out


def mean_losses(trial: Trial, losses: Tensor) -> Tensor:
    """Returns the losses [steps] over all ranks that computed one."""
    holders = torch.tensor([float(bool(losses.any()))], dtype=torch.float64)
    trial.groups.world.sum_(losses)
    return losses / trial.groups.world.sum_(holders)


def weights_differences(
    trial: Trial, reference: Reference, steps: int, out: Path
) -> dict[str, float]:
    """Returns the relative difference of each tensor, by norm; rank 0's, 0 on the others."""
    folder = save_checkpoint(trial, out, out, steps)
    theirs = reference.weights[str(steps)]
    found = dict.fromkeys(theirs, 0.0)
    if dist.get_rank() == 0:
        weights, _ = load_full(folder)
        assert set(weights) == set(theirs)
        for name, value in weights.items():
            whole = torch.from_numpy(theirs[name]).double()
            norm = float(whole.norm())
            difference = float((value.double() - whole).norm())
            found[name] = difference / norm if norm else difference
    dist.barrier()
    return found


def first_differing(trial: Trial, routing: Routing) -> dict[str, Any]:
    """Returns how many choices differ, and the largest gap among the first that do.

    Within a micro-batch the choices of later layers follow from those of earlier ones, and
    later steps from earlier ones: of the first step with a difference, the first layer of
    each micro-batch counts.
    """
    mine = json.dumps(routing.differing).encode()
    ranks = gather_bytes(mine, trial.groups.world, CPU)
    every = sorted(tuple(d) for rank in ranks for d in json.loads(rank))
    if not every:
        return {"count": 0, "largest_gap": 0.0}
    first_layer: dict[int, int] = {}
    gaps = []
    for step, place, layer, gap in every:
        if step == every[0][0] and layer == first_layer.setdefault(place, layer):
            gaps.append(abs(gap))
    return {"count": len(every), "step": every[0][0], "largest_gap": max(gaps)}


def main() -> None:
    """Runs the rows of this world size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("references", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--everything", action="store_true")
    parser.add_argument("--long", action="store_true", help="STEPS for every row")
    parser.add_argument("--only", default="", help="begin of the plans' names")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    world = dist.get_world_size()
    out = parsed.out / f"world-{world}"
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "tokenizer.json").write_text(train_characters(["abc"], 64).to_json())
    dist.barrier()
    registry = GroupRegistry()
    records = []
    everything = parsed.everything or bool(parsed.only)
    long = parsed.long or bool(parsed.only)
    for row, modes in chosen(world, everything=everything):
        if not row.name.startswith(parsed.only):
            continue
        for mode in modes:
            whole = long or (everything and not is_brief(row))
            steps = FREE_STEPS if mode == "c" else STEPS if whole else QUICK_STEPS
            record = compare(row, mode, steps, (parsed.references, out), registry)
            records.append(record)
            if dist.get_rank() == 0:
                print(json.dumps(record), flush=True)
    if dist.get_rank() == 0:
        (parsed.out / f"report-{world}.json").write_text(json.dumps(records, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
