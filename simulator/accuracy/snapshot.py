"""Predictions over a wide grid, kept in a file: what a change of the simulator moves.

Published runs say how right the simulator is; the snapshot says whether it moved. A change
that moves any entry by more than 0.5 % is meant and has its reason in CHANGELOG.md, or it is
a mistake.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.simulator.accuracy.fit_stacks import stack_calibration
from flopwright.simulator.accuracy.stack_of_row import StackKey
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.hardware.nodes.types import cluster_of
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.load import load_model
from flopwright.spec.model import ModelSpec
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Workload

TOLERANCE: Final = 0.005
_NODES: Final = ("hgx_a100", "hgx_h100", "hgx_h800", "hgx_b200", "gb200_nvl72", "mi300x_8gpu")
_MODELS: Final = (
    "llama31_8b", "llama31_70b", "gpt3_175b", "qwen3_30b_a3b", "mixtral_8x7b", "deepseek_v3",
    "kimi_k2",
)  # fmt: skip
_GPUS: Final = {"llama31_8b": 16, "deepseek_v3": 256, "kimi_k2": 256}
_SEQ_LEN: Final = 4096
_BATCH: Final = 1024
# Axes of the grid's plans; those that a model or a node rules out are left out.
_PLANS: Final[tuple[Mapping[str, object], ...]] = (
    {"zero_stage": 1},
    {"zero_stage": 3, "data_parallel": "fsdp2", "recompute": "full"},
    {"tp": 8, "zero_stage": 1, "recompute": "selective"},
    {"tp": 4, "pp": 4, "zero_stage": 1},
    {"tp": 4, "pp": 4, "vpp": 4, "schedule": "interleaved_1f1b", "micro_batch_size": 2},
    {"tp": 2, "cp": 4, "zero_stage": 1},
    {"ep": 8, "pp": 4, "zero_stage": 1, "recompute": "full"},
    {"ep": 16, "tp": 2, "zero_stage": 1, "micro_batch_size": 4},
)
_STACKS: Final = {
    "megatron_bridge": StackKey("megatron_bridge", "25.11", "dense"),
    "unknown": StackKey("other", "2030", "dense"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One prediction."""

    step_time_s: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class Moved:
    """An entry that is not what it was; a value is None where the entry is not there."""

    name: str
    field: str
    before: float | None
    after: float | None

    def text(self) -> str:
        """Returns it as a line."""
        if self.before is None or self.after is None:
            return f"{self.name}: {'new' if self.before is None else 'gone'}"
        return f"{self.name}: {self.field} {self.after / self.before - 1:+.2%}"


def predictions_now() -> dict[str, Entry]:
    """Returns the grid's predictions as the code makes them."""
    out: dict[str, Entry] = {}
    for model in _MODELS:
        for node in _NODES:
            out.update(_entries(model, node))
    return out


def _entries(model: str, node: str) -> Iterator[tuple[str, Entry]]:
    spec = load_model(model)
    num_gpus = _GPUS.get(model, 64)
    scenario = Scenario(
        name=f"{model}_{node}",
        model=spec,
        cluster=cluster_of(node, num_gpus),
        workload=Workload(
            seq_len=_SEQ_LEN,
            global_batch_size=_BATCH,
            total_tokens=_SEQ_LEN * _BATCH * 1000,
        ),
    )
    plans = list(_plans(scenario, spec, num_gpus))
    gpu = scenario.cluster.node.gpu
    calibrations: dict[str, Calibration] = {"": default_calibration(gpu)}
    if node == "hgx_h100":
        calibrations |= {name: stack_calibration(s, gpu) for name, s in _STACKS.items()}
    for name, calibration in calibrations.items():
        found = evaluate(scenario, Candidates.from_plans(plans), calibration)
        for i, plan in enumerate(plans):
            parts = (model, node, str(num_gpus), plan.label(), *([name] if name else []))
            yield (
                " | ".join(parts),
                Entry(float(found.step_time_s[i]), float(found.peak_bytes[i])),
            )


def _plans(scenario: Scenario, spec: ModelSpec, num_gpus: int) -> Iterator[ParallelPlan]:
    for axes in _PLANS:
        if "ep" in axes and spec.moe is None:
            continue
        ranks = ParallelPlan.model_validate(axes)
        dp = num_gpus // (ranks.tp * ranks.pp * ranks.cp)
        if dp < 1:
            continue
        plan = ranks.model_copy(update={"dp_shard": dp})
        if not plan_violations(plan, scenario):
            yield plan


def read_snapshot(path: Path) -> dict[str, Entry]:
    """Returns the predictions that a file keeps."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return {name: Entry(float(step), float(peak)) for name, (step, peak) in data.items()}


def snapshot_text(entries: Mapping[str, Entry]) -> str:
    """Returns the file of the predictions: a line each, six digits."""
    lines = [
        f" {json.dumps(name)}: [{entry.step_time_s:.6g}, {entry.peak_bytes:.6g}]"
        for name, entry in sorted(entries.items())
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def moved(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> tuple[Moved, ...]:
    """Returns what moved by more than TOLERANCE, and entries that came or went."""
    out = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        for field in ("step_time_s", "peak_bytes"):
            a = None if old is None else getattr(old, field)
            b = None if new is None else getattr(new, field)
            if a is None or b is None or abs(b - a) > TOLERANCE * abs(a):
                out.append(Moved(name, field, a, b))
                if a is None or b is None:
                    break
    return tuple(out)
