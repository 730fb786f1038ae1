"""What every prediction takes for granted, in words, as far as it touches the plan at hand."""

from __future__ import annotations

from collections.abc import Iterator

from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.scenario import Scenario


def standing_assumptions(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration
) -> tuple[str, ...]:
    """Returns the assumptions behind a prediction of `plan`."""
    return tuple(_all(scenario, plan, calibration))


def _all(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Iterator[str]:
    node = scenario.cluster.node
    yield "MFU counts causal attention at half its square and no recompute, against the dense peak"
    if not calibration.stack_id:
        yield f"efficiencies are a public prior ({calibration.id}): {calibration.source}"
    if plan.ep > 1:
        yield "experts are chosen evenly: every rank of an expert group has the mean load"
        if node.gpu.kind != "cpu":
            yield "the expert exchange sends a token once to each node and rank that needs it"
    if plan.pp > 1:
        yield "sends between stages do not hold the sender up; each hop has its own link"
    for cls, share in sorted(calibration.hidden_share.items()):
        if share and ((cls == "ep_comm" and plan.ep > 1) or (cls == "dp_comm" and plan.dp > 1)):
            yield f"{share:.0%} of {cls} is hidden, as far as there is compute to hide it"
    if scenario.model.tied_embeddings and plan.pp > 1:
        yield "the tied table stands on the first and the last stage; their sum is not priced"
    if plan.tp > 1:
        yield "tensor parallelism includes sequence parallelism"
    ranks = min(plan.world_size, node.gpus)
    if node.gpu.kind == "cpu" and node.cores is not None and ranks > node.cores:
        times = ranks / node.cores
        yield f"{ranks} ranks share {node.cores} cores: compute takes {times:.2g} x as long"
    if plan.activation_offload or plan.optimizer_offload:
        yield "copies to the host run beside compute at the speed of host_link"
    if plan.recompute == "full":
        yield "full recompute keeps the input of each layer and repeats its collectives too"
