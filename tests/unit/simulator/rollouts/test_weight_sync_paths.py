"""Seconds of a weight synchronisation against hand-computed parts."""

from __future__ import annotations

from typing import Any

import pytest

from flopwright.errors import InputError
from flopwright.simulator.hardware.nodes.types import cluster_of
from flopwright.simulator.rollouts.weight_sync import WIRE_SHARE, switch_seconds, sync_time
from flopwright.spec.rollouts.weight_sync import WeightSyncPlan

H800 = cluster_of("hgx_h800", 8)
TWO = cluster_of("hgx_h20", 16)


def _plan(**changes: Any) -> WeightSyncPlan:
    base: dict[str, Any] = {
        "path": "broadcast", "weights": "200 GB", "tensors": 10_000, "bucket": "2 GB",
        "source": "host", "senders": 8, "receivers": 8, "engine_ranks": 8,
    }  # fmt: skip
    return WeightSyncPlan.model_validate(base | changes)


def test_a_serial_broadcast_is_the_sum_of_its_parts() -> None:
    found = sync_time(_plan(), H800)
    assert found.copy_s == pytest.approx(200e9 / 8 / (63e9 * WIRE_SHARE))
    assert found.wire_s == pytest.approx(200e9 / (200e9 * WIRE_SHARE))
    assert found.load_s == pytest.approx(10_000 * 50e-6 + 25e9 * 2 / (3.35e12 / 2))
    assert found.fixed_s == pytest.approx(100 * 1e-3)
    parts = found.copy_s + found.wire_s + found.load_s
    assert found.sync_s == pytest.approx(parts + found.fixed_s)


def test_a_pipelined_one_pays_its_slowest_part_and_the_rest_once() -> None:
    serial, found = sync_time(_plan(), H800), sync_time(_plan(pipelined=True), H800)
    rest = serial.copy_s + serial.load_s
    assert found.sync_s == pytest.approx(serial.wire_s + rest / 100 + found.fixed_s)
    one = _plan(bucket="200 GB")
    both = sync_time(one, H800).sync_s, sync_time(one.model_copy(update={"pipelined": True}), H800)
    assert both[0] == pytest.approx(both[1].sync_s)  # a single bucket has nothing to overlap


def test_no_path_is_faster_than_its_bytes_on_paper() -> None:
    for path in ("broadcast", "p2p", "gather_broadcast", "relay"):
        found = sync_time(_plan(path=path, source="gpu"), TWO)
        assert found.sync_s > found.lower_bound_s > 0


def test_bytes_over_a_network_are_received_by_all_adapters_of_a_node_or_one() -> None:
    wide = _plan(source="gpu", senders=8, receivers=8)
    many, one = (sync_time(wide.model_copy(update={"path": p}), TWO).wire_s
                 for p in ("broadcast", "gather_broadcast"))  # fmt: skip
    assert one == pytest.approx(200e9 / (50e9 * WIRE_SHARE))
    assert many == pytest.approx(200e9 / (400e9 * WIRE_SHARE))


def test_tensor_by_tensor_costs_a_start_each_and_a_delta_less_than_all() -> None:
    buckets, tensors = sync_time(_plan(), H800), sync_time(_plan(bucket=None), H800)
    assert tensors.sync_s - buckets.sync_s == pytest.approx((10_000 - 100) * 1e-3)
    gaps = []
    for size in ("15 GB", "65 GB", "145 GB"):
        full, delta = (
            sync_time(_plan(weights=size, source="gpu", changed_share=s), TWO).sync_s
            for s in (1.0, 0.02)
        )
        assert delta < full
        gaps.append(full - delta)
    assert gaps == sorted(gaps)


def test_switch_and_sync_stand_apart() -> None:
    assert switch_seconds(0.0, H800, wake_s=3.0) == 3.0
    assert switch_seconds(63e9, H800) == pytest.approx(1 / WIRE_SHARE)


def test_a_missing_link_is_named() -> None:
    with pytest.raises(InputError, match=r"cluster\.storage"):
        sync_time(_plan(path="storage"), H800)


@pytest.mark.parametrize(
    "bad", [{"receivers": 12}, {"stages": 3}, {"rate": "0 B/s"}, {"weights": "0 GB"}]
)
def test_plans_that_cannot_be_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"engine_ranks|stages|rate|weights"):
        _plan(**bad)
