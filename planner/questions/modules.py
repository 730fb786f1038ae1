"""Which parts of the model fill a GPU: by module what is kept, by unit what a gather holds."""

from __future__ import annotations

from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import ShardShape
from flopwright.plan.parallel import SELECTIVE_TAGS, ParallelPlan
from flopwright.plan.schedules.placement import chunks_of_stage
from flopwright.planner.questions.answer import Answer, Replan
from flopwright.planner.questions.replan import changed, replan, replans
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.memory.stages import FP8_BYTES_PER_NUMBER
from flopwright.simulator.training.blocks import Blocks, price_blocks, shard_combos
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.combos import shard_shape
from flopwright.simulator.training.layers import (
    EMBEDDING,
    HEAD,
    is_transformer_layer,
    kind_of,
    prediction_layers,
)
from flopwright.simulator.training.lora import with_adapters
from flopwright.simulator.training.recipes import with_recipe
from flopwright.simulator.training.recompute import Policy, kept
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.parameters import EMBEDDING_LAYER
from flopwright.spec.scenario import Scenario
from flopwright.units import show_bytes, show_percent

LAYER_INPUTS = "layer inputs"
# The start of a tensor's name and the module it is counted to, the longer first.
_MODULES = (
    ("input_layernorm", "norms and residuals"),
    ("post_attention_layernorm", "norms and residuals"),
    ("hidden", "norms and residuals"),
    ("self_attention_res", "norms and residuals"),
    ("mlp_res", "norms and residuals"),
    ("output_attn_res", "norms and residuals"),
    ("self_attn", "attention"),
    ("mlp.experts", "experts"),
    ("mlp.shared_experts", "shared experts"),
    ("mlp.gate.", "router"),
    ("mlp.order", "router"),
    ("mlp.place", "router"),
    ("mlp", "feed-forward"),
    ("input", LAYER_INPUTS),
)


def module_of(name: str, kind: str) -> str:
    """Returns the module that a kept tensor of a kind of layer is counted to."""
    if kind in {EMBEDDING, HEAD}:
        return "embedding" if kind == EMBEDDING else "head and loss"
    return next((module for start, module in _MODULES if name.startswith(start)), name)


def kept_parts(scenario: Scenario, of: Replan, calibration: Calibration) -> dict[str, int]:
    """Returns the activation bytes of a plan's fullest stage by module, the largest first.

    What a micro-batch keeps, by module, in proportion to the stage's activations: a stage
    holds several micro-batches, and every one keeps the same.
    """
    parts: dict[str, float] = {}
    for layer, policy in _layers(scenario, of.plan, of.stage):
        for name, nbytes in _kept(scenario, of.plan, calibration, layer, policy):
            module = module_of(name, kind_of(scenario.model, layer))
            parts[module] = parts.get(module, 0.0) + nbytes
    whole = sum(parts.values())
    scale = of.memory_bytes.get("activations", 0) / whole if whole else 0.0
    order = sorted(parts, key=lambda module: (-parts[module], module))
    return {module: round(parts[module] * scale) for module in order}


def _layers(scenario: Scenario, plan: ParallelPlan, stage: int) -> list[tuple[int, Policy]]:
    """Returns the stage's layers (-1 the embedding, num_layers the head) with their policies."""
    spec, chunks = scenario.model, plan.chunk_layers(scenario.model.num_layers)
    tags = frozenset(plan.recompute_tags) or SELECTIVE_TAGS
    policy = Policy(plan.recompute, tags if plan.recompute == "selective" else frozenset())
    depth = spec.num_layers if plan.recompute_layers is None else plan.recompute_layers
    out: list[tuple[int, Policy]] = []
    for chunk in chunks_of_stage(plan, stage):
        out += [(EMBEDDING_LAYER, policy)] if chunk == 0 else []
        for place, layer in enumerate(chunks[chunk]):
            out.append((layer, policy if place < depth else Policy("none")))
        if chunk == len(chunks) - 1:
            out += [(layer, policy) for layer in (spec.num_layers, *prediction_layers(spec))]
    return out


def _shape(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> ShardShape:
    return shard_shape(scenario, shard_combos(Candidates.from_plans([plan])), calibration)


def _kept(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration, layer: int, policy: Policy
) -> list[tuple[str, float]]:
    """Returns (name, bytes) of what one layer keeps of one micro-batch."""
    workload, kind = scenario.workload, kind_of(scenario.model, layer)
    cost = layer_cost(scenario.model, layer, _shape(scenario, plan, calibration), 1)
    cost = with_adapters(cost, workload.lora_rank, workload.precision.compute, kind)
    lives = with_recipe(cost, workload.precision.gemm, workload.precision.compute, kind).lives
    rule, width = policy.of(kind), DTYPE_BYTES[workload.precision.compute]
    stays = kept(cost, rule, kind)
    narrow = FP8_BYTES_PER_NUMBER / width if plan.fp8_activations else 1.0
    return [
        (name, float(nbytes[0]) * (narrow if fp8 else 1.0))
        for name, nbytes, fp8, stay in zip(lives.name, lives.bytes, lives.fp8, stays, strict=True)
        if stay or (rule.name == "full" and name == "input")
    ]


def largest_activations(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration
) -> Answer:
    """Returns which module keeps most of the activations of the fullest stage."""
    found = replan(scenario, plan, calibration)
    parts = kept_parts(scenario, found, calibration)
    whole = sum(parts.values())
    told = [f"{name} {show_percent(b / max(whole, 1))}" for name, b in list(parts.items())[1:4]]
    first = next(iter(parts), "")
    text = (
        f"{first.capitalize()}: {show_bytes(parts.get(first, 0))} of {show_bytes(whole)} "
        f"({show_percent(parts.get(first, 0) / max(whole, 1))}) on stage {found.stage}"
    )
    return Answer(
        question="largest_activations",
        text=f"{text}; then {', '.join(told)}." if told else f"{text}.",
        data={"module": first, "by_module_bytes": parts, "stage": found.stage},
        replans=(found,),
    )


def unit_bytes(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> dict[str, int]:
    """Returns by kind of layer the bytes of its weights on one rank with nothing sharded.

    Tensor and expert parallelism cut them; the data-parallel sharding of ZeRO does not while a
    unit runs.
    """
    combos = shard_combos(Candidates.from_plans([plan]))
    blocks: Blocks = price_blocks(scenario, combos, calibration)
    width = DTYPE_BYTES[scenario.workload.precision.weights]
    units = {
        kind: round(float(table.params.held[0]) * width) for kind, table in blocks.tables.items()
    }
    return dict(sorted(units.items(), key=lambda unit: (-unit[1], unit[0])))


def largest_unit(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns which unit holds most memory while its weights are gathered."""
    units = unit_bytes(scenario, plan, calibration)
    (first, most), *others = units.items()
    sharded = changed(plan, {"zero_stage": 3})
    found = replans(scenario, [("as planned", plan), ("zero_stage 3", sharded)], calibration)
    layer = max((b for k, b in units.items() if is_transformer_layer(k)), default=0)
    beside = ", ".join(f"{kind} {show_bytes(b)}" for kind, b in others)
    held = (
        "its weights are gathered for each use"
        if plan.zero_stage == 3
        else f"zero_stage {plan.zero_stage} keeps every unit whole all the time"
    )
    return Answer(
        question="largest_unit",
        text=f"The {first}: {show_bytes(most)} unsharded ({held}); then {beside}.",
        data={
            "unit": first,
            "unsharded_bytes": most,
            "largest_layer_bytes": layer,
            "by_unit_bytes": units,
            "sharded_weights_bytes": found[-1].memory_bytes.get("weights"),
        },
        replans=found,
    )
