"""What the programs themselves write is read: their own code makes the lines here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flopwright.errors import InputError
from flopwright.store.foreign.kineto import read_kineto
from flopwright.store.foreign.steps import read_steps
from flopwright.store.foreign.verl import read_verl

Need = Callable[[str, bool, str], None]

TORCHTITAN = """
import sys, time, types
board = types.ModuleType("torch.utils.tensorboard")
board.SummaryWriter = object
sys.modules["torch.utils.tensorboard"] = board
from torchtitan.tools.logging import init_logger
init_logger()
from torchtitan.components import metrics
from torchtitan.tools import utils
made = object.__new__(metrics.MetricsProcessor)
made.job_config = types.SimpleNamespace(metrics=types.SimpleNamespace(log_freq=1))
made.parallel_dims = types.SimpleNamespace(non_data_parallel_size=1)
made.logger = types.SimpleNamespace(log=lambda *a: None)
made.num_flops_per_token, made.gpu_peak_flops = 480_000_000, int(989e12)
made.color = utils.Color()
stats = metrics.DeviceMemStats(40.0, 50.0, 45.25, 56.93, 0, 0)
made.device_memory_monitor = types.SimpleNamespace(
    get_peak_stats=lambda: stats, reset_peak_stats=lambda: None)
made.time_last_log, made.ntokens_since_last_log, made.data_loading_times = 0, 0, []
for step in range(1, 12):
    made.time_last_log = time.perf_counter() - 0.5
    made.ntokens_since_last_log, made.data_loading_times = 4096, [0.001]
    made.log(step, 8.0 - step / 10, 8.2, 1.5)
"""
VERL = """
import types, sys
from verl.utils.logger.aggregate_logger import LocalLogger
import numpy as np
timing = {"gen": 20.5, "reward": 1.25, "old_log_prob": 3.0, "ref": 2.0, "adv": 0.25,
          "update_actor": 11.0, "update_weights": 1.5, "step": 40.0}
data = {f"timing_s/{k}": v for k, v in timing.items()}
data |= {"perf/total_num_tokens": 524288, "perf/throughput": np.float64(1638.4),
         "perf/time_per_step": 40.0, "actor/entropy": float("nan"), "training/global_step": 7}
for step in (7, 8):
    LocalLogger().log(data, step)
"""
DEEPSPEED = """
import time
from types import SimpleNamespace
from deepspeed.utils import logger
from deepspeed.utils.timer import ThroughputTimer
logger.setLevel("INFO")
for handler in logger.handlers:
    handler.setLevel("INFO")
timer = ThroughputTimer(SimpleNamespace(enabled=True, synchronized=False), batch_size=16,
                        start_step=2, steps_per_output=2)
for step in range(9):
    timer.start()
    time.sleep(0.02)
    timer.stop(global_step=True)
"""
PROFILE = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, schedule
torch.set_num_threads(1)
linear, gelu = torch.nn.Linear, torch.nn.GELU
model = torch.nn.Sequential(linear(512, 2048), gelu(), linear(2048, 512))
optimizer = torch.optim.AdamW(model.parameters())
q = torch.randn(2, 4, 256, 64)
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=3),
             on_trace_ready=lambda p: p.export_chrome_trace(sys.argv[1])) as prof:
    for _ in range(5):
        loss = model(torch.randn(512, 512)).square().mean()
        loss = loss + torch.nn.functional.scaled_dot_product_attention(q, q, q).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        prof.step()
"""


def run(python: str, code: str, log: Path, *arguments: str) -> str:
    """Runs code with a program's own interpreter; returns stdout, written to `log` too."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", code, *arguments],
        capture_output=True, text=True, timeout=200, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    log.write_text(done.stdout + done.stderr)
    return done.stdout


def target(name: str, need: Need) -> str:
    folder = os.environ.get("FLOPWRIGHT_EXPORT_TARGETS", "")
    python = Path(folder) / name / "bin" / "python"
    need(name, bool(folder) and python.exists(), ". .ci/targets.sh")
    return str(python)


@pytest.mark.slow
def test_torchtitans_metrics_processor(need_service: Need, tmp_path: Path) -> None:
    log = tmp_path / "titan.log"
    text = run(target("torchtitan", need_service), TORCHTITAN, log)
    assert "\x1b[" in text  # in colour, as on a terminal
    lines = read_steps(log, "torchtitan").lines
    assert [x.step for x in lines] == list(range(1, 12))
    assert all(x.at_s is not None for x in lines)
    assert lines[0].loss == pytest.approx(7.9)
    assert lines[0].memory_bytes == round(45.25 * 2**30)
    for line in lines:
        assert line.tokens_per_s_per_gpu == pytest.approx(4096 / 0.5, rel=0.05)
        assert line.flops_per_s_per_gpu == pytest.approx(
            480e6 * line.tokens_per_s_per_gpu, rel=0.01
        )
    start = text.rindex("step: 11")
    log.write_text(text[: start + 40])
    with pytest.raises(InputError, match=r"titan\.log:11.*cut short"):
        read_steps(log, "torchtitan")


@pytest.mark.slow
def test_verls_logger(need_service: Need, tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    run(target("verl", need_service), VERL, log)
    first, second = read_verl(log)
    assert (first.round, second.round) == (7, 8)
    assert first.time_s == {
        "generation": 20.5, "reward": 1.25, "log_probs": 5.0, "update": 11.0,
        "weight_sync": 1.5, "other": pytest.approx(0.75),
    }  # fmt: skip
    assert first.tokens_per_s == pytest.approx(524288 / 40)
    assert "actor/entropy" not in first.figures


@pytest.mark.slow
def test_deepspeeds_throughput_timer(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    log = tmp_path / "ds.log"
    run(sys.executable, DEEPSPEED, log)
    found = read_steps(log, "deepspeed").lines
    assert [x.step for x in found] == [4, 6, 8]
    assert all(x.at_s is not None for x in found)
    for line in found:
        assert line.sequences_per_s == pytest.approx(16 / 0.02, rel=0.5)
    text = log.read_text()
    log.write_text(text[: text.rindex("MemAllocated") - 1])
    with pytest.raises(InputError, match="cut short"):
        read_steps(log, "deepspeed")


@pytest.mark.slow
def test_torch_profiler(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "trace.json"
    before_s = time.time()
    run(sys.executable, PROFILE, tmp_path / "out.log", str(path))
    trace = read_kineto(path)
    assert trace.ended_s is not None
    assert before_s < trace.ended_s < time.time()
    assert (trace.rank, trace.device, len(trace.steps_s)) == (0, "cpu", 3)
    kernels = trace.kernel_s
    assert {"gemm", "attention", "optimizer", "memory_bound"} <= set(kernels)
    # operators take most of a step, and never more than it
    whole = sum(trace.steps_s) / 3
    assert 0.5 * whole < sum(kernels.values()) <= 1.01 * whole
    # the model's two products are most of its work: 6 x 2 x 512 x 512 x 2048 FLOPs
    assert kernels["gemm"] == max(kernels.values())
    # oracle: the profiler's own table of self times
    data = json.loads(path.read_text())
    outer = sum(
        e["dur"] for e in data["traceEvents"]
        if e.get("cat") == "cpu_op" and e["name"] in {"aten::mm", "aten::addmm"}
    )  # fmt: skip
    assert kernels["gemm"] == pytest.approx(outer * 1e-6 / 3, rel=0.15)
    cut = tmp_path / "cut.json"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match=r"cut\.json.*cut short"):
        read_kineto(cut)


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(InputError, match="not a trace of PyTorch"):
        read_kineto(path)
    path.write_bytes(b"\x1f\x8b\x08\x00broken")
    with pytest.raises(InputError, match=r"cut short or broken|cannot be read"):
        read_kineto(path)


def test_kernels_of_a_gpu_are_told_by_name(tmp_path: Path) -> None:
    names = {
        "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NNT": "gemm",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "gemm",
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>": "attention",
        "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>": "attention_backward",
        "void at::native::multi_tensor_apply_kernel<AdamFunctor>": "optimizer",
        "void at::native::vectorized_elementwise_kernel<4, SiluFunctor>": "memory_bound",
        "sm90_fp8_m_grouped_gemm_contiguous": "grouped_gemm",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL": "comm",
    }
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": i * 100, "dur": 50,
         "args": {"Process Group Ranks": "[0, 1]"} if "nccl" in name else {}}
        for i, name in enumerate(names)
    ]  # fmt: skip
    path = tmp_path / "gpu.json"
    path.write_text(
        json.dumps({"distributedInfo": {"rank": 1, "world_size": 2}, "traceEvents": events})
    )
    trace = read_kineto(path)
    assert (trace.rank, trace.device) == (1, "gpu")
    assert trace.kernel_s == pytest.approx(
        {"gemm": 1e-4, "attention": 5e-5, "attention_backward": 5e-5, "optimizer": 5e-5,
         "memory_bound": 5e-5, "grouped_gemm": 5e-5}
    )  # fmt: skip
    assert trace.groups_s == {(0, 1): {"reduce_scatter": pytest.approx(5e-5)}}


@pytest.mark.parametrize("dur", [-5.0, float("nan"), float("inf"), "long", None])
def test_an_event_of_no_time_is_named(tmp_path: Path, dur: object) -> None:
    path = tmp_path / "trace.json"
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10, "dur": dur, "args": {}}
    path.write_text(json.dumps({"traceEvents": [event]}))
    with pytest.raises(InputError, match=r"gemm.*took less than none"):
        read_kineto(path)
