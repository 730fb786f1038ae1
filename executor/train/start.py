"""How a rank begins: what it is asked to run, and how it meets the others."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final, get_args

import torch
import torch.distributed as dist

from flopwright.errors import InputError, Violation
from flopwright.executor.launch.checks import LaunchOptions, check_request, run_folder_rules
from flopwright.executor.launch.machine import Machine, find_machine
from flopwright.executor.launch.request import (
    COLLECTIVE_TIMEOUT_S,
    ERROR_DIR,
    PROGRESS_FILE,
    REQUEST_FILE,
    STOP_FILE,
    STOP_NOW_FILE,
    STOPPED_FILE,
    RunRequest,
    SinkName,
    read_request,
    write_json,
)
from flopwright.executor.launch.resume import resumed_request
from flopwright.executor.parallel.groups import Group, gather_bytes

# Process groups give up later than the watch, which knows more to say; while rank 0 prepares
# the data the others wait longer.
_GROUPS_WAIT: Final = 2
_PREPARATION_S: Final = 6 * 3600.0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the worker's arguments."""
    parser = argparse.ArgumentParser(prog="flopwright.executor.train.worker")
    parser.add_argument("request", nargs="?", help="request.json of a run's folder")
    parser.add_argument("--plan", action="append", default=[], type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokenizer", choices=("bpe", "characters"), default="bpe")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--prefetch", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--keep-checkpoints", type=int, default=2)
    parser.add_argument("--max-rollbacks", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--allow-mismatch", action="store_true")
    parser.add_argument("--log-to", action="append", default=[], choices=get_args(SinkName))
    parser.add_argument("--kineto-trace", action="store_true")
    parser.add_argument("--collective-timeout", type=float, default=COLLECTIVE_TIMEOUT_S)
    parsed = parser.parse_args(arguments)
    if parsed.request is None and (not parsed.plan or parsed.out is None):
        parser.error("give a request file, or --plan and --out")
    return parsed


def asked_for(parsed: argparse.Namespace, out_dir: Path) -> RunRequest:
    """Returns what to run: the launcher's request, or what plans and options come to.

    Raises:
        InputError: it cannot run here, or in this folder.
    """
    if parsed.request:
        return read_request(Path(parsed.request))
    if "WORLD_SIZE" not in os.environ:
        raise InputError("the worker is one rank of a run: start it with torchrun")
    first = int(os.environ["RANK"]) == 0
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    here = find_machine()
    everywhere = Machine(cores=here.cores * nodes, gpus=here.gpus * nodes)
    # where there is a request, one rank or another of this start may have written it just now
    goes_on = parsed.resume and (out_dir / REQUEST_FILE).is_file()
    # the first rank alone: where another one looks, this run may have begun to write
    found = run_folder_rules(out_dir) if first and not goes_on else []
    try:
        request = check_request(parsed.plan, None, _options(parsed), everywhere)
    except InputError as error:
        raise InputError([*found, *error.violations]) from error
    if found:
        raise InputError(found)
    out_dir.mkdir(parents=True, exist_ok=True)
    if goes_on:
        request = resumed_request(out_dir, request)
    if first:
        _clear_last_start(out_dir)
        write_json(out_dir / REQUEST_FILE, request.to_data())
    return request


def _options(parsed: argparse.Namespace) -> LaunchOptions:
    return LaunchOptions(
        steps=parsed.steps,
        nproc=int(os.environ["WORLD_SIZE"]),
        text=parsed.text,
        tokenizer=parsed.tokenizer,
        stream=parsed.stream,
        prefetch=parsed.prefetch,
        seed=parsed.seed,
        allow_mismatch=parsed.allow_mismatch,
        log_to=tuple(parsed.log_to),
        kineto_trace=parsed.kineto_trace,
        checkpoint_every=parsed.checkpoint_every,
        keep_checkpoints=parsed.keep_checkpoints,
        max_rollbacks=parsed.max_rollbacks,
        resume=parsed.resume,
        collective_timeout_s=parsed.collective_timeout,
    )


def _clear_last_start(out_dir: Path) -> None:
    """Removes how an earlier start ended: it would be taken for this run's end."""
    names = (PROGRESS_FILE, STOP_FILE, STOP_NOW_FILE, STOPPED_FILE)
    errors = (out_dir / ERROR_DIR).glob("rank-*.json")
    for path in (*(out_dir / name for name in names), *errors):
        path.unlink(missing_ok=True)


def join(request: RunRequest) -> torch.device:
    """Joins the other ranks; returns this rank's device."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if request.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    timeout = timedelta(seconds=max(_PREPARATION_S, limit_s(request)))
    if request.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
        return device
    dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu")


def limit_s(request: RunRequest) -> float:
    """Returns after how many seconds an operation of a process group fails by itself."""
    return _GROUPS_WAIT * request.collective_timeout_s


def limit_waiting(request: RunRequest) -> None:
    """Sets the limit for the group of all ranks too, which had to wait for the data."""
    # torch has no public name for it
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s(request)), dist.group.WORLD)


def agree(request: RunRequest, device: torch.device) -> None:
    """Ends every rank where they were not all started for the same thing.

    Raises:
        InputError: another number of ranks than the plan's, or other plans or options.
    """
    needed, ranks = request.entries[0].plan.parallel.world_size, dist.get_world_size()
    if needed != ranks:
        raise InputError(
            Violation(
                field="parallel.world_size",
                value=str(needed),
                rule=f"the plan needs {needed} ranks and {ranks} were started",
                nearest_fix=f"start {needed}, or make a plan for {ranks} ranks",
            )
        )
    mine = hashlib.sha256(json.dumps(request.to_data(), sort_keys=True).encode()).digest()
    world = Group(tuple(range(ranks)), dist.get_rank(), dist.group.WORLD)
    found = gather_bytes(mine, world, device)
    others = [str(rank) for rank, digest in enumerate(found) if digest != found[0]]
    if others:
        raise InputError(
            Violation(
                rule=f"ranks {', '.join(others)} were started with another plan or other "
                "options than rank 0",
                nearest_fix="give every rank the same files and options",
            )
        )
