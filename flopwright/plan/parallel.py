"""The parallel plan: how one training step is split over ranks, and what memory moves it makes."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, NonNegativeInt

from flopwright.errors import Violation, nearest_divisors
from flopwright.plan.extra_rules import memory_move_violations, shard_violations
from flopwright.plan.schedules.placement import (
    CHUNKS_PER_STAGE,
    chunks_of_stage,
    fewest_microbatches,
    in_rounds,
)
from flopwright.plan.schedules.placement import ScheduleName as ScheduleName
from flopwright.spec.base import Grown
from flopwright.spec.model import MAX_LAYERS, ModelSpec
from flopwright.spec.scenario import Ranks, Scenario
from flopwright.spec.workload import MAX_BATCH, Workload

RecomputeName = Literal["none", "selective", "full"]
ContextName = Literal["ring", "all_gather", "ulysses"]

# A step's list is written out and replayed: with more micro-batches a rank it would not end.
MAX_MICROBATCHES: Final = 2**16
# Saved tensors that each recompute policy drops and computes again in the backward pass,
# by the `tag` of their TensorLife. "selective" is Kimi K2's list (arXiv 2507.20534, 2.4):
# norms, SwiGLU and the MLA up-projections. "full" keeps only each layer's input.
SELECTIVE_TAGS = frozenset({"norm", "swiglu", "mla_up"})
# Groups that `recompute_tags` may name. Beside the tags of the rows: attention itself
# ("core_attn"), whole blocks ("mlp", "shared_experts", "moe") and the activation between the
# matrices ("act" of a dense block, "moe_act" of the routed experts).
RECOMPUTE_TAGS: Final = (
    "norm",
    "swiglu",
    "mla_up",
    "core_attn",
    "act",
    "moe_act",
    "moe_down",
    "mlp",
    "shared_experts",
    "moe",
)


# A schedule's name in a plan's label.
_LABELS: Final[dict[ScheduleName, str]] = {
    "zb_h1": "zbh1",
    "zb_v": "zbv",
    "dualpipe_v": "dualpipev",
    "interleaved_1f1b_overlap": "epoverlap",
}


class ParallelPlan(Grown):
    """The split of one step.

    `world_size = dp_replicate * dp_shard * tp * cp * pp`. Experts borrow ranks:
    `ep` divides `dp_shard * cp * tp`. `global_batch_size = micro_batch_size *
    num_microbatches * dp`; cp does not multiply it.

    Attributes:
        data_parallel: which library shards and reduces ("deepspeed", "fsdp2", "none").
        layers_per_stage: transformer layers of each of the pp * vpp chunks; None spreads
            them as evenly as they go, the earlier chunks taking the remainder, the last
            chunk the fewest.
        fp8_activations: FP8 (1x128 tiles) storage of the inputs of the MoE up-projection
            and of SwiGLU.
        activation_offload: the other saved activations move to host memory.
        optimizer_offload: optimizer state lives in host memory.
        etp: ranks that cut each expert's matrices; ep * etp divides dp_shard * cp * tp.
        sequence_parallel: tp ranks hold tokens / tp between the cut matrices; without it
            every one holds all tokens, and sums are all-reduced.
        context_parallel: how a cp group attends: keys and values go round, are gathered
            whole, or heads are exchanged for tokens.
        recompute_tags: what "selective" drops, out of RECOMPUTE_TAGS; empty: SELECTIVE_TAGS.
        recompute_layers: "full" for the first so many layers of each chunk; None: all.
        gradient_offload, parameter_offload: shards of gradients (zero_stage 2 and up) and of
            weights (zero_stage 3) live in host memory.
        fused_loss: head and loss in one: logits are made a part of the vocabulary at a time,
            and again in the backward pass, and never stand in memory whole.
    """

    later_fields = (
        "etp",
        "sequence_parallel",
        "context_parallel",
        "recompute_tags",
        "recompute_layers",
        "gradient_offload",
        "parameter_offload",
        "fused_loss",
    )

    dp_replicate: Ranks = 1
    dp_shard: Ranks = 1
    tp: Ranks = 1
    pp: Ranks = 1
    vpp: Ranks = 1
    cp: Ranks = 1
    ep: Ranks = 1
    micro_batch_size: int = Field(default=1, ge=1, le=MAX_BATCH)
    zero_stage: Literal[0, 1, 2, 3] = 0
    data_parallel: Literal["deepspeed", "fsdp2", "none"] = "deepspeed"
    schedule: ScheduleName = "1f1b"
    layers_per_stage: tuple[NonNegativeInt, ...] | None = None
    recompute: RecomputeName = "none"
    fp8_activations: bool = False
    activation_offload: bool = False
    optimizer_offload: bool = False
    etp: Ranks = 1
    sequence_parallel: bool = True
    context_parallel: ContextName = "ring"
    recompute_tags: tuple[str, ...] = ()
    recompute_layers: int | None = Field(default=None, ge=0, le=MAX_LAYERS)
    gradient_offload: bool = False
    parameter_offload: bool = False
    fused_loss: bool = False

    @property
    def dp(self) -> int:
        """Data-parallel size: how many different batches a step sees at once."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Ranks the plan needs."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def num_chunks(self) -> int:
        """Pipeline chunks: pp stages times vpp virtual ones."""
        return self.pp * self.vpp

    def num_microbatches(self, global_batch_size: int) -> int:
        """Returns the micro-batches a rank runs in one step."""
        return global_batch_size // (self.micro_batch_size * self.dp)

    def chunk_layers(self, num_layers: int) -> tuple[range, ...]:
        """Returns the layers of each of the pp * vpp chunks, in model order."""
        sizes = self.layers_per_stage or even_split(num_layers, self.num_chunks)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(range(s, s + n) for s, n in zip(starts, sizes, strict=True))

    def stage_layers(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Returns the layers held by each of the pp stages, in model order."""
        chunks = self.chunk_layers(num_layers)
        return tuple(
            tuple(layer for c in chunks_of_stage(self, s) for layer in chunks[c])
            for s in range(self.pp)
        )

    def label(self) -> str:
        """Returns the plan's short name, e.g. 'pp16 ep16 dp128 zero1 mbs1'."""
        parts = [
            f"{k}{v}"
            for k, v in (
                ("tp", self.tp),
                ("pp", self.pp),
                ("vpp", self.vpp),
                ("cp", self.cp),
                ("ep", self.ep),
                ("etp", self.etp),
            )
            if v > 1
        ]
        if self.cp > 1 and self.context_parallel != "ring":
            parts.append(self.context_parallel)
        if self.tp > 1 and not self.sequence_parallel:
            parts.append("nosp")
        if self.schedule not in {"1f1b", "interleaved_1f1b"} and self.num_chunks > 1:
            parts.append(_LABELS.get(self.schedule, self.schedule))
        replicas = f"{self.dp_replicate}x" if self.dp_replicate > 1 else ""
        parts.append(f"dp{replicas}{self.dp_shard}")
        if self.zero_stage:
            parts.append(f"zero{self.zero_stage}")
        parts.append(f"mbs{self.micro_batch_size}")
        if self.recompute != "none":
            parts.append(self._recompute_label())
        flags = (
            ("fp8act", self.fp8_activations),
            ("actoff", self.activation_offload),
            ("optoff", self.optimizer_offload),
            ("gradoff", self.gradient_offload),
            ("paramoff", self.parameter_offload),
            ("fusedloss", self.fused_loss),
        )
        parts.extend(flag for flag, on in flags if on)
        return " ".join(parts)

    def _recompute_label(self) -> str:
        if self.recompute == "full" and self.recompute_layers is not None:
            return f"full{self.recompute_layers}"
        if self.recompute == "selective" and self.recompute_tags:
            return f"selective[{','.join(self.recompute_tags)}]"
        return self.recompute


def even_split(num_layers: int, chunks: int) -> tuple[int, ...]:
    """Returns layers per chunk: as even as they go, the last chunk never the largest."""
    base, extra = divmod(num_layers, chunks)
    return tuple(base + (1 if i < extra else 0) for i in range(chunks))


def plan_violations(plan: ParallelPlan, scenario: Scenario) -> tuple[Violation, ...]:
    """Returns every rule of shape that `plan` breaks; memory is judged later."""
    found = list(_rank_rules(plan, scenario))
    found.extend(_model_rules(plan, scenario.model))
    found.extend(shard_violations(plan, scenario.model))
    found.extend(memory_move_violations(plan))
    found.extend(_batch_rules(plan, scenario.workload))
    if scenario.workload.seq_len > scenario.model.max_seq_len:
        found.append(
            Violation(
                field="workload.seq_len",
                value=str(scenario.workload.seq_len),
                rule="must not exceed the model's max_seq_len",
                limit=str(scenario.model.max_seq_len),
                nearest_fix=f"use {scenario.model.max_seq_len}",
            )
        )
    return tuple(found)


def _rank_rules(plan: ParallelPlan, scenario: Scenario) -> list[Violation]:
    found = []
    if plan.world_size > scenario.cluster.num_gpus:
        found.append(
            Violation(
                field="parallel.world_size",
                value=str(plan.world_size),
                rule="dp_replicate*dp_shard*tp*cp*pp must not exceed the cluster's GPUs",
                limit=str(scenario.cluster.num_gpus),
                nearest_fix=f"the cluster has {scenario.cluster.num_gpus} GPUs",
            )
        )
    lending = plan.dp_shard * plan.cp * plan.tp
    if lending % plan.ep:
        near = ", ".join(map(str, nearest_divisors(plan.ep, lending)))
        found.append(
            Violation(
                field="parallel.ep",
                value=str(plan.ep),
                rule=f"must divide dp_shard*cp*tp ({lending})",
                nearest_fix=f"nearest valid: {near}",
            )
        )
    elif lending % (plan.ep * plan.etp):
        near = ", ".join(map(str, nearest_divisors(plan.etp, lending // plan.ep)))
        found.append(
            Violation(
                field="parallel.etp",
                value=str(plan.etp),
                rule=f"ep*etp must divide dp_shard*cp*tp ({lending})",
                nearest_fix=f"nearest valid: {near}",
            )
        )
    return found


def _divides(field: str, value: int, of: int, what: str) -> list[Violation]:
    if of % value == 0:
        return []
    near = ", ".join(map(str, nearest_divisors(value, of)))
    return [
        Violation(
            field=field,
            value=str(value),
            rule=f"must divide {what} ({of})",
            nearest_fix=f"nearest valid: {near}",
        )
    ]


def _model_rules(plan: ParallelPlan, model: ModelSpec) -> list[Violation]:
    found = _divides("parallel.tp", plan.tp, model.common_heads, "the attention heads")
    if model.moe is not None:
        found += _divides("parallel.ep", plan.ep, model.moe.num_experts, "the routed experts")
    elif plan.ep > 1:
        found.append(
            Violation(
                field="parallel.ep",
                value=str(plan.ep),
                rule="the model has no experts",
                nearest_fix="use 1",
            )
        )
    if plan.num_chunks > model.num_layers:
        found.append(
            Violation(
                field="parallel.pp",
                value=str(plan.pp),
                rule="pp*vpp must not exceed the model's layers",
                limit=str(model.num_layers),
                nearest_fix=f"use pp*vpp of at most {model.num_layers}",
            )
        )
    layers = plan.layers_per_stage
    chunks_fit = plan.num_chunks <= model.num_layers
    if (
        layers is not None
        and chunks_fit
        and (len(layers) != plan.num_chunks or sum(layers) != model.num_layers)
    ):
        found.append(
            Violation(
                field="parallel.layers_per_stage",
                value=str(list(layers)),
                rule=f"needs pp*vpp ({plan.num_chunks}) entries that sum to "
                f"num_layers ({model.num_layers})",
                nearest_fix=f"use {list(even_split(model.num_layers, plan.num_chunks))}",
            )
        )
    if plan.zero_stage > 1 and plan.pp > 1:
        found.append(
            Violation(
                field="parallel.zero_stage",
                value=str(plan.zero_stage),
                rule="gradients cannot be sharded across micro-batches of a pipeline",
                nearest_fix="use zero_stage 1 with pp above 1",
            )
        )
    return found + _schedule_rules(plan)


def _schedule_rules(plan: ParallelPlan) -> list[Violation]:
    least, most = CHUNKS_PER_STAGE[plan.schedule]
    if plan.vpp >= least and (not most or plan.vpp <= most):
        return []
    wanted = str(least) if least == most else f"at least {least}"
    plain = "1f1b" if plan.vpp == 1 else "interleaved_1f1b"
    return [
        Violation(
            field="parallel.schedule",
            value=plan.schedule,
            rule=f"vpp {plan.vpp} and the schedule do not go together: it takes vpp {wanted}",
            nearest_fix=f"use {plain}, or vpp {least}",
        )
    ]


def _batch_rules(plan: ParallelPlan, workload: Workload) -> list[Violation]:
    """Returns what the plan breaks at the first of the run's batches where it breaks anything."""
    return next(filter(None, (_rules_of_batch(plan, b, workload) for b in workload.batches)), [])


def _rules_of_batch(
    plan: ParallelPlan, global_batch_size: int, workload: Workload
) -> list[Violation]:
    whole = global_batch_size == workload.global_batch_size
    name = "global_batch_size" if whole else f"the batch ramp's {global_batch_size} sequences"
    found = _divides(
        "parallel.micro_batch_size",
        plan.micro_batch_size * plan.dp,
        global_batch_size,
        f"{name}, as micro_batch_size*dp,",
    )
    microbatches = plan.num_microbatches(global_batch_size)
    if microbatches > MAX_MICROBATCHES:
        found.append(
            Violation(
                field="parallel.num_microbatches",
                value=str(microbatches),
                rule="too many micro-batches a rank and step",
                limit=str(MAX_MICROBATCHES),
                nearest_fix="use more data-parallel ranks, a larger micro_batch_size or "
                "a smaller global_batch_size",
            )
        )
    if found:
        return found
    return _pipeline_batch_rules(plan, microbatches)


def _pipeline_batch_rules(plan: ParallelPlan, microbatches: int) -> list[Violation]:
    if in_rounds(plan.schedule, plan.vpp) and microbatches % plan.pp:
        near = ", ".join(map(str, nearest_divisors(plan.pp, microbatches)))
        return [
            Violation(
                field="parallel.pp",
                value=str(plan.pp),
                rule=f"must divide num_microbatches ({microbatches}) for interleaving",
                nearest_fix=f"nearest valid pp: {near}",
            )
        ]
    fewest = fewest_microbatches(plan.schedule, plan.pp)
    if microbatches < fewest:
        near_pp = microbatches // fewest_microbatches(plan.schedule, 1)
        smaller = f"pp of at most {near_pp}, " if near_pp else ""
        return [
            Violation(
                field="parallel.schedule",
                value=plan.schedule,
                rule=f"needs at least {fewest} micro-batches a rank and step, not {microbatches}",
                limit=str(fewest),
                nearest_fix=f"use {smaller}zb_v, or fewer data-parallel ranks",
            )
        ]
    return []
