"""What one GPU (or, for a trial run, one CPU core) shows: correctness, speed, curves, steps.

Under 8 minutes on one GPU, with this repository, torch and triton:

1. every kernel against float64 on fresh random inputs, forward and backward;
2. every kernel's time beside torch's, a library's and the datasheet's floor;
3. products, grouped products, attention and copies in the calibration's format, and the
   curves fitted to them;
4. three models trained for a few steps: step time and peak memory beside what the simulator
   says of the same plan with the device's public prior.

One JSON object is the last line; `--out FILE` writes it too.

    python benchmarks/gpu_check.py --out benchmarks/results/gpu_check.json
    python benchmarks/gpu_check.py --device cpu

Without a GPU only `--device cpu` runs: the kernels in Triton's interpreter at small shapes, the
ops' references for speed and curves, tiny models. It shows that the check works, not how fast
or how exact a GPU is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist

from flopwright.executor.data.token_batch import TokenBatch
from flopwright.executor.launch.request import RunEntry
from flopwright.executor.measure.fingerprint import fingerprint
from flopwright.executor.measure.probe import measure_cases
from flopwright.executor.measure.probe_cases import ProbeCase, attention_case, grouped_case
from flopwright.executor.measure.probe_points import grid_cases
from flopwright.executor.parallel.groups import GroupRegistry
from flopwright.executor.train.trial import Trial, start_trial
from flopwright.kernels.checks.contenders import Maker
from flopwright.kernels.checks.speed import MAKERS
from flopwright.kernels.checks.suite import GROUPS, outcomes
from flopwright.kernels.checks.timing import Floor, choices, time_all
from flopwright.kernels.launch import INTERPRETED
from flopwright.kernels.libraries import LIBRARIES, missing
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.accuracy.gpu_names import canonical_gpu
from flopwright.simulator.calibration.fit_probe import fit_probe
from flopwright.simulator.hardware.nodes.types import cluster_of, usual_node_type
from flopwright.simulator.training.predict import predict
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.load import load_cluster, load_model, make_plan_file
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import num_params
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import LearningRate, Precision, Workload

WARMUP, TIMED = 3, 10
PARTS = ("correctness", "speed", "curves", "steps")
# Seconds for speed and for curves on a GPU and in a trial; correctness and steps take what
# they take, about two minutes together on a GPU.
BUDGET_S = {"cuda": (120.0, 60.0), "cpu": (20.0, 5.0)}
# (catalog model, hidden size, layers, experts, sequences a micro-batch) on a GPU with 4,096
# tokens a sequence; on a CPU the widths are a sixteenth with 128 tokens.
SIZES: tuple[tuple[str, int, int, int | None, int], ...] = (
    ("llama31_8b", 1024, 16, None, 4),
    ("llama31_8b", 2048, 24, None, 2),
    ("kimi_k2", 1024, 12, 64, 2),
)


def model_of(name: str, hidden: int, layers: int, experts: int | None, seq_len: int) -> ModelSpec:
    """Returns a model of the catalog at this size."""
    more = {} if experts is None else {"num_experts": experts, "top_k": 8 if experts >= 64 else 2}
    return load_model(name).shrunk(
        hidden_size=hidden, num_layers=layers, vocab_size=8192, max_seq_len=seq_len, **more
    )


def scenario_of(model: ModelSpec, cluster: ClusterSpec, seq_len: int, batch: int) -> Scenario:
    """Returns a run of one micro-batch a step: bf16 on a GPU, fp32 on a CPU."""
    wide = cluster.node.gpu.kind == "cpu"
    precision = (
        Precision(compute="fp32", weights="fp32", master_weights="none") if wide else Precision()
    )
    steps = WARMUP + TIMED + 1
    return Scenario(
        name=f"gpu_check_{model.name}",
        model=model,
        cluster=cluster,
        workload=Workload(
            seq_len=seq_len,
            global_batch_size=batch,
            total_tokens=seq_len * batch * steps,
            precision=precision,
            learning_rate=LearningRate(kind="constant", warmup_steps=1),
        ),
    )


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """A dataset without text: every step has tokens of its own, of one micro-batch."""

    vocab: int
    seq_len: int
    batch: int

    def rank_batch(self, step: int, *_: int) -> TokenBatch:
        """Returns the tokens of a step [1, batch, seq_len + 1]."""
        shape = (1, self.batch, self.seq_len + 1)
        return TokenBatch(tokens=np.random.default_rng(step).integers(0, self.vocab, shape))


def measure(scenario: Scenario, batch: int, device: torch.device) -> dict[str, Any]:
    """Returns the measured and the predicted step of one model."""
    seq_len = scenario.workload.seq_len
    plan = ParallelPlan(micro_batch_size=batch, data_parallel="none")
    said, _ = predict(scenario, plan, whole_trace=False)
    entry = RunEntry(name="check", plan=make_plan_file(scenario, plan, "check"))
    tokens: Any = RandomTokens(scenario.model.vocab_size, seq_len, batch)
    trial = start_trial(entry, scenario.workload, tokens, GroupRegistry(), device)
    times = [timed_step(trial, step, device) for step in range(WARMUP + TIMED)][WARMUP:]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        trial.run_step(WARMUP + TIMED)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        trial.run_step(WARMUP + TIMED, meter_memory=True)
        peak = sum(trial.memory.values())  # tensors by class, without temporaries
    classes = dict(said.metrics.memory_bytes[0])
    if device.type == "cpu":  # not counted there
        classes = {c: b for c, b in classes.items() if c not in {"temporaries", "reserved"}}
    foreseen = sum(classes.values())
    step_s = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    return {
        "model": scenario.model.name,
        "num_params": num_params(scenario.model),
        "tokens": scenario.workload.tokens_per_step,
        "step_s": step_s,
        "step_spread": (high - low) / step_s,
        "predicted_step_s": said.metrics.step_time_s,
        "step_error": said.metrics.step_time_s / step_s - 1,
        "peak_bytes": peak,
        "predicted_peak_bytes": foreseen,
        "memory_error": foreseen / peak - 1,
        "calibration": said.calibration_id,
    }


def timed_step(trial: Trial, step: int, device: torch.device) -> float:
    """Returns the seconds of one optimizer step, with the device idle at both ends."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    trial.run_step(step)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def correctness(device: torch.device, seed: int, ops: list[str]) -> dict[str, Any]:
    """Returns what every kernel's check showed, and which failed; of all ops where none is named.

    Without a GPU our kernels run in Triton's interpreter, in a process of its own.
    """
    if device.type == "cpu" and not INTERPRETED:
        return interpreted(seed, ops)
    real = device.type == "cuda"
    found = list(outcomes(device, seed, real, ops=ops))
    rivals = [o for o in ops or LIBRARIES if real and not missing(o)]
    others = list(outcomes(device, seed, real, "library", rivals)) if rivals else []
    rows = [
        {
            "op": o.op,
            "passes": o.passes,
            "error": o.error,
            "worst_of_allowed": max((v.worst for v in o.verdicts), default=None),
            "results": {v.name: [v.worst, v.error] for v in o.verdicts},
        }
        for o in (*found, *others)
    ]
    return {
        "seed": seed,
        "failed": [o.op for o in found if not o.passes],
        "library_failed": [o.op for o in others if not o.passes],
        "ops": rows,
    }


def interpreted(seed: int, ops: list[str]) -> dict[str, Any]:
    """Returns `correctness` as a process says it that interprets the kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, "--device", "cpu", "--only", "correctness"]
    command += ["--seed", str(seed), "--ops", *ops]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["correctness"]
    return found


def speed(device: torch.device, cluster: ClusterSpec, budget_s: float) -> dict[str, Any]:
    """Returns each contender's times, and which kernel is the better one on this card."""
    real, gpu = device.type == "cuda", cluster.node.gpu
    maker = Maker(device, torch.bfloat16 if real else torch.float32, 1 if real else 64)
    floor = Floor(gpu.peak_flops_per_s["bf16"], gpu.hbm_bytes_per_s) if real else None
    rows = list(time_all(maker, MAKERS, floor, time.monotonic() + budget_s))
    when = f"measured {datetime.now(UTC).date().isoformat()}"
    card = torch.cuda.get_device_name(device) if real else "cpu"
    return {"card": card, "rows": rows, "choices": choices(rows, when) if real else {}}


def curve_cases(kind: str) -> list[ProbeCase]:
    """Returns products, copies, grouped products and attention over a grid of shapes."""
    dtype = "bf16" if kind == "cuda" else "fp32"
    if kind == "cpu":
        small = [grouped_case(16, 2, 32, 32, dtype), attention_case(1, 32, 2, 1, 16, 16, dtype)]
        return [*small, *grid_cases((dtype,), kind)[:2]]
    cases = grid_cases((dtype,), kind)
    for rows, experts, k, n in (
        (64, 24, 7168, 4096), (512, 24, 7168, 4096), (1365, 24, 7168, 4096),
        (512, 24, 2048, 7168), (2048, 8, 4096, 4096), (256, 64, 3584, 6144),
    ):  # fmt: skip
        cases.append(grouped_case(rows, experts, k, n, dtype))
    for seq in (512, 2048, 8192):
        cases.append(attention_case(8192 // seq, seq, 64, 64, 192, 128, dtype))
        cases.append(attention_case(8192 // seq, seq, 64, 8, 128, 128, dtype))
    return cases


def curves(device: torch.device, budget_s: float) -> dict[str, Any]:
    """Returns the probe's points and the calibration fitted to them."""
    report = measure_cases(
        curve_cases(device.type), fingerprint(1, device.type), device, budget_s=budget_s
    )
    return {"probe": report.to_data(), "calibration": fit_probe(report).to_data()}


def training_steps(device: torch.device, cluster: ClusterSpec, folder: Path) -> list[Any]:
    """Returns measured and predicted steps of every size."""
    shrink, seq_len = (1, 4096) if device.type == "cuda" else (16, 128)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous", rank=0, world_size=1,
    )  # fmt: skip
    steps = []
    for name, hidden, layers, experts, batch in SIZES:
        few = experts if shrink == 1 or experts is None else 8
        model = model_of(name, hidden // shrink, -(-layers // (shrink // 4 or 1)), few, seq_len)
        scenario = scenario_of(model, cluster, seq_len, batch)
        steps.append(measure(scenario, batch, device))
    dist.destroy_process_group()
    return steps


def cluster_here(device: torch.device) -> ClusterSpec:
    """Returns one GPU of the catalog's node that holds this card, or the CPU machine."""
    if device.type == "cpu":
        return load_cluster("local_2cpu")
    name = torch.cuda.get_device_name(device)
    gpu = canonical_gpu(name)
    if gpu is None:
        sys.exit(f"gpu_check: {name!r} is not in the hardware catalog (docs/adding.md)")
    return cluster_of(usual_node_type(gpu), 1)


def main() -> None:
    """Runs every part and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ops", nargs="*", choices=tuple(GROUPS), default=[], help="to check")
    parser.add_argument("--seed", type=int, help="of the inputs; drawn anew where not given")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"not_measured": "no CUDA device here; --device cpu tries the check"}))
        return
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    cluster, began = cluster_here(device), time.monotonic()
    speed_s, curves_s = BUDGET_S[device.type]
    seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
    result: dict[str, Any] = {
        "device": fingerprint(1, options.device).to_data(),
        "measured_on_a_gpu": device.type == "cuda",
        "date": datetime.now(UTC).date().isoformat(),
        "repeats": TIMED,
    }
    if "correctness" in options.only:
        result["correctness"] = correctness(device, seed, options.ops)
    if "speed" in options.only:
        result["speed"] = speed(device, cluster, speed_s)
    if "curves" in options.only:
        result["curves"] = curves(device, curves_s)
    if "steps" in options.only:
        with tempfile.TemporaryDirectory() as folder:
            result["training_steps"] = training_steps(device, cluster, Path(folder))
    result["seconds"] = time.monotonic() - began
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    sys.exit(1 if result.get("correctness", {}).get("failed") else 0)


if __name__ == "__main__":
    main()
