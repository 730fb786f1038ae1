"""Sizes and rates of another world are refused: no search hangs, no figure is 0 or infinite."""

from __future__ import annotations

import pytest

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.spec.load import dump_yaml, load_scenario, scenario_from_text

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
TEXT = dump_yaml(K2)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("num_layers: 61", "num_layers: 100000000000", "less than or equal to 10000"),
        ("hidden_size: 7168", "hidden_size: 99999999999999999999", "less than or equal to"),
        ("    gpus: 8", "    gpus: 1000000000", "less than or equal to 10000000"),
        ("    gpus: 8", "    gpus: 100000", "must not exceed 10,000,000 GPUs"),
        ("num_nodes: 256", "num_nodes: 9223372036854775807", "less than or equal to 10000000"),
        ("global_batch_size: 16384", "global_batch_size: 9223372036854775807", "2147483648"),
        ("total_tokens: 15500000000000", "total_tokens: 1e300", "must not exceed 1e+18"),
        ("  tp: []", "  tp: [99999999999999999999]", "less than or equal to 10000000"),
        ("bandwidth: 50 GB/s", "bandwidth: 1e-300 B/s", "bandwidth must be from 1 B/s"),
        ("bandwidth: 50 GB/s", "bandwidth: 1e300 B/s", "bandwidth must be from 1 B/s"),
        ("latency: 3 us", "latency: 2 h", "latency must be from 0 s to 60 min, not 2 h"),
        ("launch_floor: 4 us", "launch_floor: 1e9 h", "launch_floor must be from"),
        ("bf16: 989 TFLOP/s", "bf16: 1e-9 FLOP/s", "peak_flops.bf16 must be from 1 FLOP/s"),
        ("hbm: 80 GiB", "hbm: 1e300 B", "hbm must be from 1 MiB to"),
        ("hbm_bandwidth: 3.35 TB/s", "hbm_bandwidth: 0 B/s", "hbm_bandwidth must be from 1 B/s"),
    ],
)
def test_what_no_machine_has_is_refused(old: str, new: str, words: str) -> None:
    assert old in TEXT, TEXT
    with pytest.raises(InputError) as caught:
        scenario_from_text(TEXT.replace(old, new, 1))
    assert words in str(caught.value)


def test_a_split_into_more_chunks_than_layers_is_named_without_listing_it() -> None:
    """Its even split would have 10^14 entries."""
    plan = ParallelPlan(pp=10**7, vpp=10**7, schedule="interleaved_1f1b", layers_per_stage=(61,))
    fields = {v.field for v in plan_violations(plan, K2)}
    assert {"parallel.pp", "parallel.world_size"} <= fields
