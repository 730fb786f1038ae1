"""What a dry run is made of, each against what knows nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from flopwright.executor.dry.products import reader_of
from flopwright.executor.dry.record import Recorder
from flopwright.executor.dry.roles import fewest, roles
from flopwright.executor.dry.world import fake_world
from flopwright.kernels.attention.op import attention
from flopwright.kernels.grouped_gemm.op import grouped_gemm
from flopwright.kernels.linear.op import linear
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.rank_step import Call

CPU = torch.device("cpu")


def test_a_collective_is_read_as_it_was_called() -> None:
    """Eight ranks, this one the sixth; a group of every second rank."""
    with fake_world(5, 8) as mode, mode, Recorder(mode, CPU) as recorder:
        odd = dist.new_group([1, 3, 5, 7])
        with recorder.action("F(0,1)"):
            dist.all_reduce(torch.empty(10))
            dist.broadcast(torch.empty(3, dtype=torch.int64), src=0)
            dist.all_gather_into_tensor(torch.empty(8, 6), torch.empty(2, 6), group=odd)
            dist.reduce_scatter_tensor(torch.empty(2), torch.empty(8), group=odd)
            rows = torch.empty(10, 4, dtype=torch.bfloat16)
            out = torch.empty(7, 4, dtype=torch.bfloat16)
            dist.all_to_all_single(out, rows, [1, 2, 3, 1], [4, 3, 1, 2], group=odd)
            dist.all_to_all_single(torch.empty(8), torch.empty(8), group=odd)
            dist.isend(torch.empty(5), dst=7, group=odd)
            dist.recv(torch.empty(5), src=1, group=odd)
        world, some = tuple(range(8)), (1, 3, 5, 7)
        assert recorder.calls == [
            Call("F(0,1)", "all_reduce", world, 40),
            Call("F(0,1)", "broadcast", world, 24),
            Call("F(0,1)", "all_gather", some, 192),
            Call("F(0,1)", "reduce_scatter", some, 32),
            Call("F(0,1)", "all_to_all", some, (10 - 1) * 4 * 2),  # one row stays here
            Call("F(0,1)", "all_to_all", some, 24),
            Call("F(0,1)", "send", (5, 7), 20),
            Call("F(0,1)", "recv", (1, 5), 20),
        ]


def test_a_collective_that_nobody_knows_is_an_error() -> None:
    unknown = pytest.raises(NotImplementedError, match="reduce_")
    with fake_world(0, 2) as mode, mode, Recorder(mode, CPU), unknown:
        dist.reduce(torch.empty(4), dst=0)


def _step(model: nn.Module, x: Tensor) -> None:
    y = model(x)
    for _ in range(3):
        y = torch.nn.functional.gelu(y) + y.transpose(0, 1).contiguous().t()
    y.square().sum().backward()


def _model() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 32)), torch.empty(48, 64)


def test_the_fullest_moment_is_that_of_torchs_tracker() -> None:
    with fake_world(0, 1) as mode, mode:
        model, x = _model()
        tracker = MemTracker()
        tracker.track_external(model, x)
        with tracker:
            _step(model, x)
        found = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
        with Recorder(mode, CPU) as recorder:
            model, x = _model()
            recorder.start()
            with recorder.action("F(0,0)"):
                _step(model, x)
    assert max(b.peak_bytes for b in recorder.meter.boundaries) == found


def test_meta_tensors_and_views_are_no_bytes_of_the_device() -> None:
    with fake_world(0, 1) as mode, mode, Recorder(mode, CPU) as recorder:
        x = torch.empty(4, 6)
        assert recorder.meter.live_bytes == 96
        y = x.t()[1:]
        z = torch.empty(50, device="meta")
        assert recorder.meter.live_bytes == 96
        assert (y.shape, z.device.type) == ((5, 4), "meta")
        del x
        assert recorder.meter.live_bytes == 96  # the view holds it
        del y
        assert recorder.meter.live_bytes == 0


def _counted(call: Any) -> tuple[int, dict[Any, int]]:
    with fake_world(0, 1) as mode:
        recorder = Recorder(mode, CPU)
        with mode, recorder, recorder.action("F(0,0)"):
            call()
    return sum(recorder.flops.values()), dict(recorder.products)


def test_products_of_a_linear_layer_and_its_backward() -> None:
    def plain(x: Tensor, w: Tensor) -> None:
        (x @ w.t()).sum().backward()

    with FlopCounterMode(display=False) as counter:
        plain(torch.ones(6, 5, requires_grad=True), torch.ones(7, 5, requires_grad=True))

    def ours() -> None:
        x, w = torch.empty(2, 3, 5, requires_grad=True), torch.empty(7, 5, requires_grad=True)
        linear(x, w, None).sum().backward()

    flops, products = _counted(ours)
    assert flops == counter.get_total_flops() == 3 * 2 * 6 * 5 * 7
    assert sorted((p.m, p.k, p.n) for p in products) == [(6, 5, 7), (6, 7, 5), (7, 6, 5)]


def test_products_of_experts_and_their_backward() -> None:
    def ours() -> None:
        x, w = torch.empty(12, 5, requires_grad=True), torch.empty(3, 7, 5, requires_grad=True)
        grouped_gemm(x, w, torch.empty(3, dtype=torch.int64)).sum().backward()

    flops, products = _counted(ours)
    assert flops == 3 * 2 * 12 * 5 * 7
    found = sorted((p.m, p.k, p.n, p.batch) for p in products)
    assert found == [(4, 5, 7, 3), (4, 7, 5, 3), (7, 4, 5, 3)]


@pytest.mark.parametrize("window", [0, 3])
def test_products_of_attention_are_those_of_the_pairs_in_sight(window: int) -> None:
    seq, heads, width, values = 9, 2, 6, 4
    pairs = sum(
        not window or key > query - window for query in range(seq) for key in range(query + 1)
    )

    def ours() -> None:
        q, k = (torch.empty(1, seq, heads, width, requires_grad=True) for _ in range(2))
        v = torch.empty(1, seq, heads, values, requires_grad=True)
        out, _ = attention(q, k, v, 0.5, window)
        out.sum().backward()

    flops, _ = _counted(ours)
    # forward: scores and values; backward: scores again and two gradients of each product
    assert flops == 2 * heads * pairs * (width + values + 3 * width + 2 * values)


def test_an_unknown_product_is_an_error() -> None:
    assert reader_of("aten::add") is None
    with pytest.raises(NotImplementedError, match="aten::_grouped_mm"):
        reader_of("aten::_grouped_mm")


def test_every_rank_stands_where_one_of_the_roles_does() -> None:
    plan = ParallelPlan(dp_replicate=2, dp_shard=8, tp=2, cp=2, pp=3, ep=4)
    mesh, axes = Mesh(plan), ("pp", "ep", "tp", "cp")

    def place(rank: int) -> tuple[int, ...]:
        at = mesh.coordinates(rank)
        return tuple(at[axis] for axis in axes)

    chosen = roles(plan)
    every = {place(rank) for rank in range(plan.world_size)}
    assert sorted(place(role.rank) for role in chosen) == sorted(every)
    whole = [mesh.coordinates(role.rank)["pp"] for role in chosen if role.whole]
    assert whole == [0, 1, 2]


def test_the_shortest_step_of_a_schedule() -> None:
    assert fewest(ParallelPlan(pp=4)) == 1
    assert fewest(ParallelPlan(pp=4, vpp=2, schedule="interleaved_1f1b")) == 4
