"""Linear attention in a probe: at the shapes that models run, and a curve of its own."""

from __future__ import annotations

import pytest
import torch

from flopwright.executor.measure.fingerprint import fingerprint
from flopwright.executor.measure.probe import measure_cases
from flopwright.executor.measure.probe_cases import linear_case
from flopwright.executor.measure.probe_delta import kda_case
from flopwright.executor.measure.probe_plain import copy_case
from flopwright.executor.measure.probe_points import shapes_for
from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import OpKind, OpTable, ShardShape
from flopwright.simulator.calibration.fit_probe import fit_probe
from flopwright.simulator.operators.curves import resolve_curve
from flopwright.simulator.operators.variants import Variant
from flopwright.spec.load import load_scenario

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["kimi_k3_mini_2cpu_fp32", "kimi_linear_mini_2cpu_fp32"])
def test_every_product_and_both_kinds_of_attention_are_probed(name: str) -> None:
    scenario = load_scenario(name)

    def shapes(ops: OpTable) -> set[tuple[float, ...]]:
        sides = [getattr(ops, s)[:, 0].tolist() for s in ("m", "k", "n", "batch", "flops")]
        rows = zip(ops.kind, ops.kernel, *sides, strict=True)
        return {
            (kernel == "kda", *values)
            for kind, kernel, *values in rows
            if kind != OpKind.MEMORY_BOUND
        }

    probed = {
        s for c in shapes_for(scenario.model, scenario.workload, (4,)) for s in shapes(c.rows)
    }
    shape = ShardShape(micro_batch_size=4, seq_len=scenario.workload.seq_len, dtype="fp32")
    for layer in range(-1, scenario.model.num_layers + 1):
        assert shapes(layer_cost(scenario.model, layer, shape).ops) <= probed, layer


def test_the_delta_rule_gets_a_curve_of_its_own() -> None:
    cases = [
        kda_case(1, 32, 2, 8, "fp32"),
        kda_case(2, 64, 2, 16, "fp32"),
        linear_case(64, 64, 64, "fp32"),
        copy_case(2**16),
    ]
    prepared = cases[0].prepare(CPU)
    out = prepared.run()
    gradients = torch.autograd.grad(out, prepared.inputs, torch.ones_like(out))
    for tensor, grad in zip(prepared.inputs, gradients, strict=True):
        assert grad.shape == tensor.shape
        assert torch.isfinite(grad).all()
    report = measure_cases(cases, fingerprint(1), CPU, budget_s=1e-6)
    points = [p for p in report.operators if p.kind == "kda"]
    assert {(p.phase, p.m, p.k) for p in points} == {
        (phase, m, k) for phase in ("forward", "backward") for m, k in ((32, 8), (64, 16))
    }
    calibration = fit_probe(report)
    gpu = load_scenario("kimi_k3_mini_2cpu_fp32").cluster.node.gpu
    for phase in ("forward", "backward"):
        found = resolve_curve(calibration, gpu, Variant("kda", "fp32", phase))
        assert (found.curve.kind, found.curve.points, found.assumption) == ("kda", 2, "")
