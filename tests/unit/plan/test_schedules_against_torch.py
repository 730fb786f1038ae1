"""Our compute lists are those of torch.distributed.pipelining, action for action."""

from types import SimpleNamespace
from typing import Any

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import ActionKind
from flopwright.plan.schedules.placement import ScheduleName, stage_of_chunk
from flopwright.plan.schedules.registry import compute_actions

pytestmark = pytest.mark.slow

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
torch_utils = pytest.importorskip("torch.distributed.pipelining._utils")

Compute = tuple[ActionKind, int, int]
KINDS = {
    "F": ActionKind.FORWARD,
    "B": ActionKind.BACKWARD,
    "I": ActionKind.BACKWARD_INPUT,
    "W": ActionKind.BACKWARD_WEIGHT,
}
STAGES = range(2, 17)


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
        submod=None,
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


def _ours_paired(schedule: ScheduleName, pp: int, microbatches: int) -> list[list[bool]]:
    plan = ParallelPlan(pp=pp, vpp=2, schedule=schedule)
    return [[a.overlaps for a in actions] for actions in compute_actions(plan, microbatches)]


def _parts(action: Any) -> tuple[Any, ...]:
    """Returns an action, or the two that torch runs as one."""
    return action.sub_actions or (action,)


def _actions(row: list[Any]) -> list[Compute]:
    """Returns the compute actions of one rank's list."""
    return [
        (KINDS[a.computation_type.value], a.stage_index, a.microbatch_index)
        for whole in row
        if whole is not None
        for a in _parts(whole)
        if a.computation_type.value in KINDS
    ]


def _order(made: Any) -> list[list[Compute]]:
    """Returns torch's own list of a schedule, compute actions only."""
    return [_actions(made.pipeline_order[rank]) for rank in sorted(made.pipeline_order)]


def _made(name: str, pp: int, vpp: int, microbatches: int) -> Any:
    """Returns torch's schedule as rank 0 makes it."""
    stages = [_stage(pp, vpp, i * pp) for i in range(vpp)]
    return getattr(torch_schedules, name)(stages, microbatches, loss_fn=_no_loss)


def _rank_lists(name: str, pp: int, vpp: int, microbatches: int) -> list[list[Any]]:
    """Returns what torch works out a rank at a time, without the checks of its constructor."""
    made = object.__new__(getattr(torch_schedules, name))
    made.pp_group_size, made.n_local_stages = pp, vpp
    made.num_stages = made._num_stages = pp * vpp
    made._n_microbatches = microbatches
    made.number_of_rounds = max(1, microbatches // pp)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    return [made._calculate_single_rank_operations(rank) for rank in range(pp)]


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


@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize("vpp", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_interleaved_is_torchs(vpp: int, pp: int, rounds: int) -> None:
    microbatches = rounds * pp
    rows = _rank_lists("ScheduleInterleaved1F1B", pp, vpp, microbatches)
    theirs = [_actions(row) for row in rows]
    assert all(len(row) == 2 * vpp * microbatches for row in theirs)
    assert _ours("interleaved_1f1b", pp, vpp, microbatches) == theirs


@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize("extra", [0, 1, 5, 16])
def test_1f1b_is_what_torch_runs(pp: int, extra: int) -> None:
    assert _ours("1f1b", pp, 1, pp + extra) == _executed("Schedule1F1B", pp, pp + extra)


@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize("extra", [0, 1, 5, 16])
def test_1f1b_is_torchs_list(pp: int, extra: int) -> None:
    """Torch's list, not what it runs, numbers the last rank's forwards from 1 (2.13): left out."""
    made = torch_schedules.Schedule1F1B(_stage(pp, 1, 0), pp + extra, loss_fn=_no_loss)
    assert _ours("1f1b", pp, 1, pp + extra)[:-1] == _order(made)[:-1]


@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize("microbatches", [1, 3, 8, 21])
def test_gpipe_is_torchs(pp: int, microbatches: int) -> None:
    made = torch_schedules.ScheduleGPipe(_stage(pp, 1, 0), microbatches, loss_fn=_no_loss)
    ours = _ours("gpipe", pp, 1, microbatches)
    assert ours == _order(made)
    assert ours == _executed("ScheduleGPipe", pp, microbatches)


@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize("vpp", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_interleaved_zb_h1_is_torchs(vpp: int, pp: int, rounds: int) -> None:
    microbatches = rounds * pp
    rows = _rank_lists("ScheduleInterleavedZeroBubble", pp, vpp, microbatches)
    assert _ours("zb_h1", pp, vpp, microbatches) == [_actions(row) for row in rows]


@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_zb_h1_is_torchs_with_one_stage_a_rank(pp: int, rounds: int) -> None:
    """Torch's constructor asks for two stages a rank; its rule also makes the list of one."""
    microbatches = rounds * pp
    rows = _rank_lists("ScheduleInterleavedZeroBubble", pp, 1, microbatches)
    assert _ours("zb_h1", pp, 1, microbatches) == [_actions(row) for row in rows]


@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize("microbatches", [1, 2, 7, 16, 31, 32, 33, 64])
def test_zb_v_is_torchs(pp: int, microbatches: int) -> None:
    rows = _rank_lists("ScheduleZBVZeroBubble", pp, 2, microbatches)
    assert _ours("zb_v", pp, 2, microbatches) == [_actions(row) for row in rows]


@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize("extra", [0, 1, 2, 7, 32])
def test_dualpipe_v_is_torchs(pp: int, extra: int) -> None:
    microbatches = 2 * pp + extra
    rows = _rank_lists("ScheduleDualPipeV", pp, 2, microbatches)
    assert _ours("dualpipe_v", pp, 2, microbatches) == [_actions(row) for row in rows]
    paired = [[len(_parts(w)) == 2 for w in row for _ in _parts(w)] for row in rows]
    assert _ours_paired("dualpipe_v", pp, microbatches) == paired


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("interleaved_1f1b", "ScheduleInterleaved1F1B"),
        ("zb_h1", "ScheduleInterleavedZeroBubble"),
        ("zb_v", "ScheduleZBVZeroBubble"),
        ("dualpipe_v", "ScheduleDualPipeV"),
    ],
)
def test_the_whole_pipeline_order_is_torchs(ours: ScheduleName, theirs: str, pp: int) -> None:
    """As the constructor leaves it, all of its checks passed."""
    assert _ours(ours, pp, 2, 4 * pp) == _order(_made(theirs, pp, 2, 4 * pp))


@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize(("schedule", "style"), [("zb_v", "v"), ("interleaved_1f1b", "loop")])
def test_chunks_stand_where_torch_puts_them(pp: int, schedule: ScheduleName, style: str) -> None:
    plan = ParallelPlan(pp=pp, vpp=2, schedule=schedule)
    theirs = torch_utils.generate_stage_to_rank_mapping(pp, 2 * pp, style=style)
    assert {c: stage_of_chunk(plan, c) for c in range(2 * pp)} == theirs
