"""What every prediction takes for granted, in words, as far as it touches the plan at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flopwright.models.vision.cost import image_flops, projector_params, tower_params
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.model import ModelSpec
from flopwright.spec.packing import causal_share
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
    yield from _routing(scenario, plan)
    if plan.pp > 1:
        yield "sends between stages do not hold the sender up; each hop has its own link"
    yield from _overlap(plan, calibration)
    if scenario.model.tied_embeddings and plan.pp > 1:
        yield "the tied table stands on the first and the last stage; their sum is not priced"
    if plan.tp > 1 and plan.sequence_parallel:
        yield "tensor parallelism includes sequence parallelism"
    yield from _documents(scenario)
    yield from _software(scenario, calibration)
    ranks = min(plan.world_size, node.gpus)
    if node.gpu.kind == "cpu" and node.cores is not None and ranks > node.cores:
        times = ranks / node.cores
        yield f"{ranks} ranks share {node.cores} cores: compute takes {times:.2g} x as long"
    moves = (plan.activation_offload, plan.optimizer_offload, plan.gradient_offload)
    if any(moves) or plan.parameter_offload:
        yield "copies to the host run beside compute at the speed of host_link"
    if plan.recompute == "full":
        yield "full recompute keeps the input of each layer and repeats its collectives too"


def _routing(scenario: Scenario, plan: ParallelPlan) -> Iterator[str]:
    load = scenario.workload.expert_load
    if scenario.model.moe is None or plan.ep == 1:
        return
    if load.kind == "balanced":
        yield "experts are chosen evenly: every rank of an expert group has the mean load"
    elif load.kind == "power_law":
        yield (
            f"the i-th busiest expert has a load of i^-{load.exponent:g}, experts stand on ranks "
            "in random order, and all ranks wait for the busiest"
        )
    else:
        yield f"every expert takes {load.capacity_factor:g} of the mean load, padded"
    if scenario.cluster.node.gpu.kind != "cpu":
        yield "the expert exchange sends a token once to each node and rank that needs it"


def _documents(scenario: Scenario) -> Iterator[str]:
    packing, seq_len = scenario.workload.packing, scenario.workload.seq_len
    if packing is None:
        return
    if not packing.lengths:
        yield (
            "the lengths of packed documents are not given: attention is priced as if each row "
            "were one document"
        )
        return
    share = causal_share([(d.tokens, d.share) for d in packing.lengths], seq_len)
    yield (
        f"documents of the given lengths leave {share:.0%} of a row's causal pairs, which alone "
        "are computed; MFU counts all of them"
    )


def _overlap(plan: ParallelPlan, calibration: Calibration) -> Iterator[str]:
    in_use = {
        "tp_comm": plan.tp > 1,
        "cp_comm": plan.cp > 1 and plan.context_parallel == "ring",
        "ep_comm": plan.ep > 1,
        "dp_comm": plan.dp > 1,
        "dp_gather": plan.dp > 1 and plan.zero_stage in {1, 2},
        "pp_comm": plan.pp > 1,
    }
    for cls, share in sorted(calibration.hidden_share.items()):
        if share and in_use.get(cls):
            yield f"{share:.0%} of {cls} is hidden, as far as there is compute to hide it"


def _software(scenario: Scenario, calibration: Calibration) -> Iterator[str]:
    workload = scenario.workload
    if any(calibration.layer_host_s.values()):
        texts = (f"{1e3 * s:.3g} ms a {k} layer" for k, s in calibration.layer_host_s.items())
        yield f"the host launches a micro-batch's work in {', '.join(sorted(texts))}"
    if calibration.attention_kernel == "unfused":
        yield "attention runs as separate kernels that write and keep all scores"
    if workload.precision.gemm != "same":
        yield f"products of the layers run in {workload.precision.gemm}; a weight's cast is free"
    if workload.lora_rank is not None:
        yield (
            f"every matrix of the layers but the router has an adapter of rank "
            f"{workload.lora_rank}; MFU still counts 6 FLOPs a weight"
        )
    if scenario.model.mtp_layers:
        yield "prediction modules stand on the last stage and use its head once more each"
    yield from _vision(scenario.model)


# An image whose cost is told: 448 x 448 pixels, 32 x 32 patches of 14.
_TOLD_PATCHES: Final = 1024


def _vision(model: ModelSpec) -> Iterator[str]:
    tower = model.vision
    if tower is None:
        return
    weights = tower_params(tower) + projector_params(tower, model.hidden_size)
    flops = image_flops(tower, model.hidden_size, _TOLD_PATCHES)
    yield (
        f"text alone: the vision tower and its projector ({weights / 1e6:,.0f} million weights, "
        f"{flops / 1e12:.2g} TFLOP forward for an image of {_TOLD_PATCHES:,} patches) are in no "
        "number here"
    )
