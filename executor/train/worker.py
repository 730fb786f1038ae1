"""One rank of a run: `torchrun ... -m flopwright.executor.train.worker`.

Takes either a request that the launcher wrote (`worker REQUEST.json`), or, started by hand
or by an exported script, plans and a folder (`worker --plan plan.yaml --out run`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from flopwright.errors import InputError, Violation
from flopwright.executor.data.batches import TOKENIZER_FILE, Dataset, open_dataset
from flopwright.executor.data.domains import is_mixture
from flopwright.executor.data.mixture import MixedDataset
from flopwright.executor.data.prepare import open_mixture, prepare, prepare_mixture
from flopwright.executor.launch.checks import LaunchOptions, check_request, run_folder_rules
from flopwright.executor.launch.machine import Machine, die_with_parent, find_machine
from flopwright.executor.launch.progress import Progress, progress_lines, progress_writer
from flopwright.executor.launch.request import (
    COLLECTIVE_TIMEOUT_S,
    DATA_DIR,
    ERROR_DIR,
    PROBE_FILE,
    PROGRESS_FILE,
    REQUEST_FILE,
    STOP_FILE,
    RunEntry,
    RunRequest,
    SinkName,
    read_request,
    write_json,
)
from flopwright.executor.launch.resume import resumed_request, undo_after
from flopwright.executor.parallel.groups import Group, GroupRegistry, gather_bytes
from flopwright.executor.train.evaluate import held_out_loss
from flopwright.executor.train.failure import report_failure
from flopwright.executor.train.results import (
    gather_memory,
    launch_noise_floor,
    make_measurement,
    step_times,
    write_measurement,
)
from flopwright.executor.train.rounds import History, run_rounds
from flopwright.executor.train.saves import Saves, begin_with, export_hf, go_on
from flopwright.executor.train.trial import Trial, start_trial
from flopwright.executor.train.watch import Watch, end_process

# Process groups give up later than the watch, which knows more to say; while rank 0 prepares
# the data the others wait longer.
_GROUPS_WAIT = 2
_PREPARATION_S = 6 * 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs this rank; returns the exit code. Why it ends is told by `report_failure`."""
    die_with_parent()
    parsed = _parse(arguments)
    out_dir = Path(parsed.request).parent if parsed.request else Path(parsed.out)
    try:
        request = _request(parsed, out_dir)
        device = _join(request)
        _agree(request, device)
        # a run that the launcher started is shown by the launcher
        show = _ignore if parsed.request else progress_lines(_print)
        run(request, out_dir, device, show)
        show({"phase": f"done, everything is in {out_dir}", "share": 1.0})
    except Exception as error:
        return report_failure(out_dir, error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def run(request: RunRequest, out_dir: Path, device: torch.device, show: Progress) -> None:
    """Prepares data, trains every plan in turns, and writes what the run showed.

    Progress goes to the progress file and to `show`, on rank 0.
    """
    first = dist.get_rank() == 0
    say = progress_writer(out_dir / PROGRESS_FILE, show) if first else _ignore
    dataset = _dataset(request, out_dir, say)
    if request.probe:
        _probe(request, out_dir, device, say)
    registry = GroupRegistry(timedelta(seconds=_GROUPS_WAIT * request.collective_timeout_s))
    trials = [_start(e, request, dataset, registry, device) for e in request.entries]
    say({"phase": "train", "share": 0.0})
    saves = Saves(trials, request, out_dir)
    watch = Watch(request.collective_timeout_s, end_process(out_dir))
    with watch.running():
        if request.resume_step:
            with watch.waiting("the checkpoints to go on from", trials[0].groups.world):
                for trial in trials:
                    go_on(trial, out_dir, request.resume_step)
        elif request.start_from is not None:
            with watch.waiting("the checkpoint to begin with", trials[0].groups.world):
                for trial in trials:
                    begin_with(trial, Path(request.start_from))
        if first:  # what it goes on from could be read
            undo_after(out_dir, request)
        histories = run_rounds(trials, request, out_dir, say, watch, saves)
        say({"phase": "evaluate", "share": 0.0})
        _finish(request, trials, histories, out_dir, watch, saves)


def _start(
    entry: RunEntry,
    request: RunRequest,
    dataset: Dataset | MixedDataset,
    registry: GroupRegistry,
    device: torch.device,
) -> Trial:
    """Returns a plan's trial; why one cannot start says which plan it is."""
    try:
        return start_trial(entry, request.workload(entry), dataset, registry, device)
    except Exception as error:
        error.add_note(f"at the start of plan '{entry.name}'")
        raise


def _finish(
    request: RunRequest,
    trials: Sequence[Trial],
    histories: Sequence[History],
    out_dir: Path,
    watch: Watch,
    saves: Saves,
) -> None:
    first = dist.get_rank() == 0
    times = [step_times(h) for h in histories] if first else []
    floor = launch_noise_floor(request, [t.step_time_s for t in times]) if first else None
    for i, trial in enumerate(trials):
        with watch.waiting(f"the held-out loss of plan '{trial.entry.name}'", trial.groups.world):
            held_out = held_out_loss(trial, request.held_out_sequences)
            memory = gather_memory(trial)
        saves.finish(i, _same_everywhere(len(histories[i].losses), trial))
        if first and request.export_hf:
            export_hf(trial, out_dir)
        if first:
            measurement = make_measurement(
                trial, request, histories[i], times[i], memory, held_out, floor
            )
            write_measurement(out_dir, measurement, histories[i])
    dist.barrier()


def _same_everywhere(value: int, trial: Trial) -> int:
    """Returns rank 0's value on every rank."""
    tensor = torch.tensor([value if dist.get_rank() == 0 else 0], device=trial.device)
    return int(trial.groups.world.sum_(tensor))


def _dataset(request: RunRequest, out_dir: Path, say: Progress) -> Dataset | MixedDataset:
    """Returns the run's data, prepared by rank 0; an input error there ends every rank."""
    entry = request.entries[0]
    workload, model = request.workload(entry), entry.plan.scenario.model
    folder, text = out_dir / DATA_DIR, Path(request.text) if request.text else None
    # what a run goes on with are the tokens that it began with
    if dist.get_rank() == 0 and not (request.resume_step and (folder / TOKENIZER_FILE).is_file()):

        def show(phase: str, share: float) -> None:
            say({"phase": phase, "share": share})

        if text is not None and is_mixture(text):
            prepare_mixture(text, model, folder, request.tokenizer, show)
        else:
            prepare(text, model, workload, folder, request.tokenizer, show)
    dist.barrier()
    if text is not None and is_mixture(text):
        return open_mixture(text, folder, workload, model.vocab_size)
    return open_dataset(folder, workload, model.vocab_size)


def _probe(request: RunRequest, out_dir: Path, device: torch.device, say: Progress) -> None:
    """Measures the machine with this launch's processes, so that both see the same moment."""
    from flopwright.executor.measure.probe import run_probe

    report = run_probe(
        device,
        [e.plan for e in request.entries],
        budget_s=request.probe_budget_s,
        progress=lambda what: say({"phase": f"probe: {what}", "share": 0.0}),
    )
    if dist.get_rank() == 0:
        write_json(out_dir / PROBE_FILE, report.to_data())


def _join(request: RunRequest) -> torch.device:
    """Joins the other ranks; returns this rank's device."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if request.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    timeout = timedelta(seconds=max(_PREPARATION_S, _GROUPS_WAIT * request.collective_timeout_s))
    if request.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
        return device
    dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu")


def _agree(request: RunRequest, device: torch.device) -> None:
    """Ends every rank where they were not all started for the same thing."""
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


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="flopwright.executor.train.worker")
    parser.add_argument("request", nargs="?", help="request.json of a run's folder")
    parser.add_argument("--plan", action="append", default=[], type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokenizer", choices=("bpe", "characters"), default="bpe")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--keep-checkpoints", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--allow-mismatch", action="store_true")
    parser.add_argument("--log-to", action="append", default=[], choices=get_args(SinkName))
    parser.add_argument("--kineto-trace", action="store_true")
    parser.add_argument("--collective-timeout", type=float, default=COLLECTIVE_TIMEOUT_S)
    parsed = parser.parse_args(arguments)
    if parsed.request is None and (not parsed.plan or parsed.out is None):
        parser.error("give a request file, or --plan and --out")
    return parsed


def _request(parsed: argparse.Namespace, out_dir: Path) -> RunRequest:
    if parsed.request:
        return read_request(Path(parsed.request))
    if "WORLD_SIZE" not in os.environ:
        raise InputError("the worker is one rank of a run: start it with torchrun")
    first = int(os.environ["RANK"]) == 0
    options = LaunchOptions(
        steps=parsed.steps,
        nproc=int(os.environ["WORLD_SIZE"]),
        text=parsed.text,
        tokenizer=parsed.tokenizer,
        seed=parsed.seed,
        allow_mismatch=parsed.allow_mismatch,
        log_to=tuple(parsed.log_to),
        kineto_trace=parsed.kineto_trace,
        checkpoint_every=parsed.checkpoint_every,
        keep_checkpoints=parsed.keep_checkpoints,
        resume=parsed.resume,
        collective_timeout_s=parsed.collective_timeout,
    )
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    here = find_machine()
    everywhere = Machine(cores=here.cores * nodes, gpus=here.gpus * nodes)
    # where there is a request, one rank or another of this start may have written it just now
    goes_on = parsed.resume and (out_dir / REQUEST_FILE).is_file()
    # the first rank alone: where another one looks, this run may have begun to write
    found = run_folder_rules(out_dir) if first and not goes_on else []
    try:
        request = check_request(parsed.plan, None, options, everywhere)
    except InputError as error:
        raise InputError([*found, *error.violations]) from error
    if found:
        raise InputError(found)
    out_dir.mkdir(parents=True, exist_ok=True)
    if goes_on:
        request = resumed_request(out_dir, request)
    if first:
        _clear_failed_start(out_dir)
        write_json(out_dir / REQUEST_FILE, request.to_data())
    return request


def _clear_failed_start(out_dir: Path) -> None:
    """Removes what a start that made no step left: it would be taken for this run's."""
    for path in (
        out_dir / PROGRESS_FILE,
        out_dir / STOP_FILE,
        *(out_dir / ERROR_DIR).glob("rank-*.json"),
    ):
        path.unlink(missing_ok=True)


def _ignore(event: dict[str, Any]) -> None:
    """Takes the progress of ranks that nobody watches."""


def _print(line: str) -> None:
    if dist.get_rank() == 0:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
