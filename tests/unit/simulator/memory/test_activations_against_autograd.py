"""Priced activations against what autograd keeps while a stage's list runs for real."""

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import ActionKind
from flopwright.plan.schedules.registry import compute_actions
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.load import load_scenario
from flopwright.spec.parameters import EMBEDDING_LAYER

torch = pytest.importorskip("torch")

MINI = load_scenario("kimi_k2_mini_2cpu_fp32")


def _kept_by_autograd(plan: ParallelPlan, stage: int) -> tuple[int, int]:
    """Runs one rank's compute actions and returns (peak bytes saved, bytes of weights)."""
    from flopwright.executor.measure.memory import saved_bytes, weight_bytes
    from flopwright.models.transformer.module import build_stage, init_weights_, loss

    spec, batch, seq = MINI.model, plan.micro_batch_size, MINI.workload.seq_len
    layers = list(plan.stage_layers(spec.num_layers)[stage])
    first, last = stage == 0, stage == plan.pp - 1
    layers = [EMBEDDING_LAYER] * first + layers + [spec.num_layers] * last
    module = build_stage(spec, layers, dtype=torch.float32, device=torch.device("cpu"))
    init_weights_(module, spec, 0)
    module.train()
    m = plan.num_microbatches(MINI.workload.global_batch_size)
    edges = {}
    with saved_bytes([module]) as meter:
        for action in compute_actions(plan, m)[stage]:
            if action.kind is ActionKind.BACKWARD:
                edge, shape = edges.pop(action.microbatch)
                torch.autograd.backward((edge,), (torch.ones(shape),))
                continue
            if first:
                x = torch.randint(0, spec.vocab_size, (batch, seq))
            else:
                x = torch.randn(batch, seq, spec.hidden_size).requires_grad_()
            out = module(x)
            if last:
                out = loss(out, torch.randint(0, spec.vocab_size, (batch, seq)))
            edges[action.microbatch] = torch.autograd.graph.get_gradient_edge(out), out.shape
            del x, out
    return meter.peak_bytes, weight_bytes([module])


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(micro_batch_size=4),
        ParallelPlan(pp=2, micro_batch_size=4),
        ParallelPlan(pp=2, micro_batch_size=2, schedule="gpipe"),
    ],
    ids=lambda p: f"{p.label()} {p.schedule}",
)
def test_every_stage_keeps_what_is_priced(plan: ParallelPlan) -> None:
    priced = evaluate(MINI, Candidates.from_plans([plan])).memory_bytes
    for stage in range(plan.pp):
        kept, weights = _kept_by_autograd(plan, stage)
        assert priced["activations"][stage, 0] == pytest.approx(kept, rel=0.01)
        assert priced["weights"][stage, 0] == weights
