"""Packed documents shrink the attention that is priced by the pairs they leave, and are told."""

from __future__ import annotations

from typing import Any

import pytest

from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import OpKind, ShardShape
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_scenario
from flopwright.spec.packing import DocumentLength, Packing, causal_share

SCENARIO = load_scenario("kimi_k2_mini_2cpu_fp32")
LENGTHS = (DocumentLength(tokens=16, share=0.5), DocumentLength(tokens=100, share=0.5))
PAIRS = tuple((d.tokens, d.share) for d in LENGTHS)


def attention_flops(documents: tuple[tuple[int, float], ...]) -> float:
    shape = ShardShape(micro_batch_size=2, seq_len=128, dtype="fp32", documents=documents)
    ops = layer_cost(SCENARIO.model, 1, shape).ops
    kinds = ops.kind == OpKind.ATTENTION
    return float((ops.flops * ops.count)[kinds].sum())


def test_only_pairs_within_documents_are_counted() -> None:
    whole, packed = attention_flops(()), attention_flops(PAIRS)
    assert packed / whole == pytest.approx(causal_share(PAIRS, 128), rel=1e-12)
    assert packed < 0.6 * whole


def test_a_step_is_shorter_and_says_why() -> None:
    def step(packing: Packing | None) -> tuple[float, tuple[str, ...]]:
        update: dict[str, Any] = {"packing": packing, "seq_len": 512, "global_batch_size": 16}
        workload = SCENARIO.workload.model_copy(update=update)
        scenario = SCENARIO.model_copy(update={"workload": workload})
        found, _ = predict(scenario, ParallelPlan(dp_shard=2, micro_batch_size=4))
        return found.metrics.step_time_s, found.assumptions

    plain, known, unknown = step(None), step(Packing(lengths=LENGTHS)), step(Packing())
    assert known[0] < plain[0] == unknown[0]
    assert not any("documents" in text for text in plain[1])
    assert any("leave" in text and "causal pairs" in text for text in known[1])
    assert any("priced as if each row were one document" in text for text in unknown[1])
