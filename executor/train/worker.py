"""One rank of a run: `torchrun ... -m flopwright.executor.train.worker`.

Takes either a request that the launcher wrote (`worker REQUEST.json`), or, started by hand
or by an exported script, plans and a folder (`worker --plan plan.yaml --out run`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flopwright.executor.data.batches import TOKENIZER_FILE
from flopwright.executor.data.opening import RunData, open_data, prepare_data
from flopwright.executor.data.prefetch import Prefetcher, Reading
from flopwright.executor.launch.machine import die_with_parent
from flopwright.executor.launch.progress import Progress, note, progress_lines, progress_writer
from flopwright.executor.launch.request import (
    DATA_DIR,
    PROBE_FILE,
    PROGRESS_FILE,
    STOPPED_FILE,
    RunEntry,
    RunRequest,
    write_json,
)
from flopwright.executor.launch.resume import is_done, remake_end, undo_after
from flopwright.executor.launch.stopped import stopped_record, stopped_text
from flopwright.executor.parallel.groups import GroupRegistry
from flopwright.executor.train.evaluate import held_out_loss
from flopwright.executor.train.failure import keep_reserve, report_failure
from flopwright.executor.train.recovery import Memory, Recovery
from flopwright.executor.train.results import (
    gather_memory,
    launch_noise_floor,
    make_measurement,
    step_times,
    write_measurement,
)
from flopwright.executor.train.rounds import History, Keepers, run_rounds
from flopwright.executor.train.saves import Saves, begin_with, export_hf, go_on
from flopwright.executor.train.start import (
    agree,
    asked_for,
    join,
    limit_s,
    limit_waiting,
    parse_arguments,
)
from flopwright.executor.train.stops import make_stops, neighbours_of
from flopwright.executor.train.trial import Trial, start_trial
from flopwright.executor.train.watch import Watch, end_process, left_alone


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs this rank; returns the exit code. Why it ends is told by `report_failure`.

    A run that was told to end (SIGTERM) and has saved itself ends with 0: to torchrun any other
    code is a failure, after which it starts the ranks again.
    """
    die_with_parent()
    parsed = parse_arguments(arguments)
    out_dir = Path(parsed.request).parent if parsed.request else Path(parsed.out)
    # a run that the launcher started is shown by the launcher
    show = _ignore if parsed.request else progress_lines(_print)
    try:
        request = asked_for(parsed, out_dir)
        if parsed.resume and is_done(request, out_dir):
            show({"phase": f"{out_dir} has made its {request.steps} steps", "share": 1.0})
            return 0
        device = join(request)
        agree(request, device)
        if run(request, out_dir, device, show):
            show({"phase": f"done, everything is in {out_dir}", "share": 1.0})
    except Exception as error:
        return report_failure(out_dir, error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def run(request: RunRequest, out_dir: Path, device: torch.device, show: Progress) -> bool:
    """Prepares data, trains every plan in turns, and writes what the run showed.

    Progress goes to the progress file and to `show`, on rank 0. Returns whether it came to its
    end, and was not told to end before.
    """
    first = dist.get_rank() == 0
    say = progress_writer(out_dir / PROGRESS_FILE, show) if first else _ignore
    if first:
        keep_reserve(out_dir)
    dataset = _dataset(request, out_dir, say)
    limit_waiting(request)
    if request.probe:
        _probe(request, out_dir, device, say)
    registry = GroupRegistry(timedelta(seconds=limit_s(request)))
    trials = [_start(e, request, dataset, registry, device) for e in request.entries]
    for trial in trials:
        _read_ahead(trial, request, out_dir)
    say({"phase": "train", "share": 0.0})
    recovery = Recovery(request, out_dir, say, [Memory() for _ in trials])
    keepers = Keepers(
        watch=Watch(request.collective_timeout_s, end_process(out_dir)),
        saves=Saves(trials, request, out_dir, recovery.state_of),
        stops=make_stops(out_dir),
        recovery=recovery,
    )
    neighbours = neighbours_of(trials[0].groups.world, device)
    with keepers.watch.running(), keepers.stops.listening(neighbours, left_alone(trials)):
        _begin(request, trials, out_dir, keepers)
        if first:  # what it goes on from could be read
            undo_after(out_dir, request)
            remake_end(out_dir, request)
        histories = run_rounds(trials, request, out_dir, say, keepers)
        if keepers.stops.order is not None:
            _stop(trials, histories, out_dir, say, keepers)
            return False
        say({"phase": "evaluate", "share": 0.0})
        _finish(request, trials, histories, out_dir, keepers)
    return True


def _begin(request: RunRequest, trials: Sequence[Trial], out_dir: Path, keepers: Keepers) -> None:
    """Gives the plans the state that they go on from, where there is one."""
    world = trials[0].groups.world
    if request.resume_step:
        with keepers.watch.waiting("the checkpoints to go on from", world):
            for i, trial in enumerate(trials):
                manifest = go_on(trial, out_dir, request.resume_step)
                keepers.recovery.take(i, trial, manifest.state)
    elif request.start_from is not None:
        with keepers.watch.waiting("the checkpoint to begin with", world):
            for trial in trials:
                begin_with(trial, Path(request.start_from))


def _start(
    entry: RunEntry,
    request: RunRequest,
    dataset: RunData,
    registry: GroupRegistry,
    device: torch.device,
) -> Trial:
    """Returns a plan's trial; why one cannot start says which plan it is."""
    try:
        return start_trial(entry, request.workload(entry), dataset, registry, device)
    except Exception as error:
        error.add_note(f"at the start of plan '{entry.name}'")
        raise


def _stop(
    trials: Sequence[Trial],
    histories: Sequence[History],
    out_dir: Path,
    say: Progress,
    keepers: Keepers,
) -> None:
    """Saves what the plans have come to, and says who was told to end and where they stand."""
    steps, saves = {}, keepers.saves
    for i, trial in enumerate(trials):
        made = _same_everywhere(len(histories[i].losses), trial)
        steps[trial.entry.name] = made
        with keepers.watch.waiting(f"the checkpoint after {made} steps", trial.groups.world):
            if made:
                saves.at_end(i, made)
            saves.settle(i)
            if dist.get_rank() == 0:
                saves.ended(i)
    keepers.stops.saved()
    order = keepers.stops.order
    assert order is not None
    if dist.get_rank() == 0:
        record = stopped_record(order.by, order.rank, steps)
        write_json(out_dir / STOPPED_FILE, record)
        say(note(stopped_text(record, out_dir)))
    dist.barrier()


def _finish(
    request: RunRequest,
    trials: Sequence[Trial],
    histories: Sequence[History],
    out_dir: Path,
    keepers: Keepers,
) -> None:
    """Saves and measures every plan's end, and writes what the run showed."""
    first, watch, saves = dist.get_rank() == 0, keepers.watch, keepers.saves
    times = [step_times(h) for h in histories] if first else []
    floor = launch_noise_floor(request, [t.step_time_s for t in times]) if first else None
    for i, trial in enumerate(trials):
        name, world = trial.entry.name, trial.groups.world
        with watch.waiting(f"the last checkpoint of plan '{name}'", world):
            saves.at_end(i, _same_everywhere(len(histories[i].losses), trial))
        with watch.waiting(f"the held-out loss of plan '{name}'", world):
            held_out = held_out_loss(trial, request.held_out_sequences)
            memory = gather_memory(trial)
        saves.settle(i)
        if first and request.export_hf:
            export_hf(trial, out_dir)
        if first:
            measurement = make_measurement(
                trial, request, histories[i], times[i], memory, held_out, floor
            )
            write_measurement(out_dir, measurement, histories[i])
            saves.ended(i)
    dist.barrier()


def _same_everywhere(value: int, trial: Trial) -> int:
    """Returns rank 0's value on every rank."""
    tensor = torch.tensor([value if dist.get_rank() == 0 else 0], device=trial.device)
    return int(trial.groups.world.sum_(tensor))


def _dataset(request: RunRequest, out_dir: Path, say: Progress) -> RunData:
    """Returns the run's data, prepared by rank 0; an input error there ends every rank."""
    entry = request.entries[0]
    workload, model = request.workload(entry), entry.plan.scenario.model
    folder, text = out_dir / DATA_DIR, Path(request.text) if request.text else None
    # what a run goes on with are the tokens that it began with
    if dist.get_rank() == 0 and not (request.resume_step and (folder / TOKENIZER_FILE).is_file()):

        def show(phase: str, share: float) -> None:
            say({"phase": phase, "share": share})

        prepare_data(
            text, model, workload, folder, request.tokenizer, stream=request.stream, progress=show
        )
    dist.barrier()
    share = (dist.get_rank(), dist.get_world_size())
    vocab, stream = model.vocab_size, request.stream
    return open_data(text, folder, workload, vocab, stream=stream, share=share)


def _read_ahead(trial: Trial, request: RunRequest, out_dir: Path) -> None:
    """Gives a trial a data worker, if batches are to be made before their steps."""
    if not request.prefetch:
        return
    trial.ahead = Prefetcher(
        Reading(
            text=request.text,
            folder=str(out_dir / DATA_DIR),
            stream=request.stream,
            workload=trial.workload,
            dp_rank=trial.groups.coordinates["dp"],
            dp=trial.plan.dp,
            micro_batch_size=trial.plan.micro_batch_size,
            steps=request.steps,
            ahead=request.prefetch,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )
    )


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


def _ignore(event: dict[str, Any]) -> None:
    """Takes the progress of ranks that nobody watches."""


def _print(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
