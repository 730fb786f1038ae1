"""The command line and environment that start the ranks: pure functions, used by exports too."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from flopwright.executor.launch.request import WORKER_MODULE


def torchrun_arguments(
    request: str | Path,
    *,
    nproc_per_node: int,
    log_dir: str | Path | None = None,
    nnodes: int = 1,
    rendezvous: str | None = None,
) -> tuple[str, ...]:
    """Returns torchrun's arguments, the program's name not among them.

    Args:
        request: path of the RunRequest file.
        nproc_per_node: ranks on each node.
        log_dir: where each rank's output goes; None leaves it on the terminal.
        nnodes: nodes of the run.
        rendezvous: "host:port" that all nodes can reach; None (one node only) lets torchrun
            meet itself on a free port of the loopback interface.
    """
    assert nnodes == 1 or rendezvous is not None, "several nodes need a place to meet"
    meeting = (
        ("--standalone", "--local-addr=127.0.0.1")
        if rendezvous is None
        else ("--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}", "--rdzv-id=flopwright")
    )
    logs = () if log_dir is None else (f"--log-dir={log_dir}", "--redirects=3")
    return (
        *meeting,
        f"--nnodes={nnodes}",
        f"--nproc-per-node={nproc_per_node}",
        "--max-restarts=0",
        *logs,
        "-m",
        WORKER_MODULE,
        str(request),
    )


def torchrun_command(
    request: str | Path, *, nproc_per_node: int, log_dir: str | Path | None = None
) -> tuple[str, ...]:
    """Returns the command that starts all ranks of a run on this machine."""
    arguments = torchrun_arguments(request, nproc_per_node=nproc_per_node, log_dir=log_dir)
    return (sys.executable, "-m", "torch.distributed.run", *arguments)


def rank_environment(base: Mapping[str, str], device: str) -> dict[str, str]:
    """Returns the ranks' environment: one OpenMP thread a rank, loopback, no JIT builds.

    Args:
        base: the environment to extend; OMP_NUM_THREADS is kept where it is set.
        device: "cpu" or "cuda".
    """
    environment = {
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **base,
        "DS_ACCELERATOR": device,
    }
    if device == "cpu":
        environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment
