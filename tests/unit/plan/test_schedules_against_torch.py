"""Our compute lists are those of torch.distributed.pipelining, action for action."""

from types import SimpleNamespace
from typing import Any

import pytest

from flopwright.plan.parallel import ParallelPlan, ScheduleName
from flopwright.plan.schedules.actions import ActionKind
from flopwright.plan.schedules.registry import compute_actions

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

Compute = tuple[ActionKind, int, int]
KINDS = {"F": ActionKind.FORWARD, "B": ActionKind.BACKWARD}


def _stage(pp: int, vpp: int, index: int) -> SimpleNamespace:
    """What a schedule asks of a stage: sizes, its place, and (when it runs) its two methods."""
    log: list[Compute] = []
    return SimpleNamespace(
        num_stages=pp * vpp,
        group_size=pp,
        group_rank=index % pp,
        stage_index=index,
        is_first=index == 0,
        is_last=False,
        has_backward=True,
        stage_index_to_group_rank={},
        log=log,
        forward_one_chunk=lambda m, *_, **__: log.append((ActionKind.FORWARD, index, m)),
        backward_one_chunk=lambda m, **_: log.append((ActionKind.BACKWARD, index, m)),
        get_fwd_recv_ops=lambda _: [],
        get_fwd_send_ops=lambda _: [],
        get_bwd_recv_ops=lambda _: [],
        get_bwd_send_ops=lambda _: [],
        perform_reduce_grad=_no_loss,
    )


def _no_loss(*_: Any) -> None:
    return None


def _ours(schedule: ScheduleName, pp: int, vpp: int, microbatches: int) -> list[list[Compute]]:
    plan = ParallelPlan(pp=pp, vpp=vpp, schedule=schedule)
    lists = compute_actions(plan, microbatches)
    return [[(a.kind, a.chunk, a.microbatch) for a in actions] for actions in lists]


def _order(made: Any) -> list[list[Compute]]:
    """Returns torch's own list of a schedule, compute actions only."""
    return [
        [
            (KINDS[a.computation_type.value], a.stage_index, a.microbatch_index)
            for a in made.pipeline_order[rank]
            if a is not None and a.computation_type.value in KINDS
        ]
        for rank in sorted(made.pipeline_order)
    ]


def _executed(name: str, pp: int, microbatches: int) -> list[list[Compute]]:
    """Returns what torch's single-stage schedule really runs on each rank."""
    out = []
    for rank in range(pp):
        stage = _stage(pp, 1, rank)
        made = getattr(torch_schedules, name)(stage, microbatches, loss_fn=_no_loss)
        made._initialize_stage = _no_loss
        made._step_microbatches()
        out.append(stage.log)
    return out


@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.parametrize("vpp", [2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_interleaved_is_torchs(vpp: int, pp: int, rounds: int) -> None:
    microbatches = rounds * pp
    stages = [_stage(pp, vpp, i * pp) for i in range(vpp)]
    made = torch_schedules.ScheduleInterleaved1F1B(stages, microbatches, loss_fn=_no_loss)
    theirs = _order(made)
    assert all(len(row) == 2 * vpp * microbatches for row in theirs)
    assert _ours("interleaved_1f1b", pp, vpp, microbatches) == theirs


@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.parametrize("extra", [0, 1, 5, 16])
def test_1f1b_is_what_torch_runs(pp: int, extra: int) -> None:
    assert _ours("1f1b", pp, 1, pp + extra) == _executed("Schedule1F1B", pp, pp + extra)


@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.parametrize("extra", [0, 1, 5, 16])
def test_1f1b_is_torchs_list(pp: int, extra: int) -> None:
    """Torch's list, not what it runs, numbers the last rank's forwards from 1 (2.13): left out."""
    made = torch_schedules.Schedule1F1B(_stage(pp, 1, 0), pp + extra, loss_fn=_no_loss)
    assert _ours("1f1b", pp, 1, pp + extra)[:-1] == _order(made)[:-1]


@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.parametrize("microbatches", [1, 3, 8, 21])
def test_gpipe_is_torchs(pp: int, microbatches: int) -> None:
    made = torch_schedules.ScheduleGPipe(_stage(pp, 1, 0), microbatches, loss_fn=_no_loss)
    ours = _ours("gpipe", pp, 1, microbatches)
    assert ours == _order(made)
    assert ours == _executed("ScheduleGPipe", pp, microbatches)
