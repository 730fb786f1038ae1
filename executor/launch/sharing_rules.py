"""What tensor and context parallelism ask of a model and its sequences to be run here.

The planner prices plans that do not divide evenly, or repeat key heads; the executor cuts
whole heads and equal runs of tokens, and refuses the rest by name.
"""

from __future__ import annotations

from collections.abc import Iterable

from flopwright.errors import nearest_divisors
from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.model import GqaAttention, MlaAttention, ModelSpec

Rule = tuple[str, bool, str, str]  # field, whether it is asked for, its value, what to do


def sharing_rules(plan: PlanFile) -> Iterable[Rule]:
    """Yields the rules of parallel.tp and parallel.cp."""
    parallel, model = plan.parallel, plan.scenario.model
    yield from _tensor_rules(parallel, model)
    yield from _context_rules(parallel, model)
    yield _expert_rule(parallel, model)
    yield _token_rule(parallel, plan.scenario.workload.seq_len)


def _tensor_rules(plan: ParallelPlan, model: ModelSpec) -> Iterable[Rule]:
    for of, what in _cut_counts(model):
        fix = f"use {_near(plan.tp, of)}: each rank holds whole ones"
        yield ("parallel.tp", of % plan.tp > 0, f"{plan.tp}, of {of} {what}", fix)
    part = -(-model.vocab_size // plan.tp)
    empty = part * (plan.tp - 1) >= model.vocab_size
    value = f"{plan.tp}, of {model.vocab_size} tokens"
    yield ("parallel.tp", empty, value, "use less: a rank would hold no row of the vocabulary")
    attention, linear = model.attention, model.linear_attention is not None
    normed = isinstance(attention, GqaAttention) and attention.qk_norm
    together = isinstance(attention, GqaAttention) and attention.qk_norm_whole
    value = f"{plan.tp}, with a norm over all heads"
    yield ("parallel.tp", plan.tp > 1 and together, value, "use 1: heads would be apart")
    value, fix = f"{plan.tp}, with an indexer", "use 1: it learns from all heads together"
    yield ("parallel.tp", plan.tp > 1 and _indexed(model), value, fix)
    apart = plan.tp > 1 and not plan.sequence_parallel and (normed or linear)
    fix = "use true: gradients of these norms are parts of a sum on each rank"
    value = f"false, with {'linear attention' if linear else 'normalised queries and keys'}"
    yield ("parallel.sequence_parallel", apart, value, fix)


def _indexed(model: ModelSpec) -> bool:
    return isinstance(model.attention, MlaAttention) and model.attention.indexer is not None


def _cut_counts(model: ModelSpec) -> Iterable[tuple[int, str]]:
    """Yields what tp must divide, and its name."""
    attention, moe = model.attention, model.moe
    if isinstance(attention, GqaAttention):
        yield attention.num_kv_heads, "key heads"
    if moe is None or moe.first_dense_layers:
        yield model.mlp.intermediate_size, "columns of a feed-forward block"
    if moe is not None and moe.num_shared_experts:
        width = moe.num_shared_experts * moe.expert_intermediate_size
        yield width, "columns of the shared experts"


def _expert_rule(plan: ParallelPlan, model: ModelSpec) -> Rule:
    biased = model.moe is not None and model.moe.bias
    fix = "use 1: each of these ranks would add the experts' biases"
    return ("parallel.etp", plan.etp > 1 and biased, f"{plan.etp}, with biases", fix)


def _context_rules(plan: ParallelPlan, model: ModelSpec) -> Iterable[Rule]:
    attention, exchanged = model.attention, plan.context_parallel == "ulysses"
    window = attention.sliding_window if isinstance(attention, GqaAttention) else None
    sinks = isinstance(attention, GqaAttention) and attention.sinks
    yield ("parallel.cp", plan.cp > 1 and sinks, f"{plan.cp}, with attention sinks", "use 1")
    value, fix = f"{plan.cp}, with an indexer", "use 1: it chooses among the whole sequence"
    yield ("parallel.cp", plan.cp > 1 and _indexed(model), value, fix)
    fix = "use context_parallel ulysses: only it sees runs of neighbouring tokens"
    windowed = plan.cp > 1 and window is not None and not exchanged
    yield ("parallel.cp", windowed, f"{plan.cp}, with a sliding window", fix)
    # Of MLA's heads, each with a key of its own, the plan's own rules say so.
    keys = attention.num_kv_heads if isinstance(attention, GqaAttention) else plan.tp * plan.cp
    heads = keys // plan.tp
    few = exchanged and heads % plan.cp > 0
    fix = f"use {_near(plan.cp, max(1, heads))}, or context_parallel ring"
    yield ("parallel.cp", few, f"{plan.cp}, of {heads} key heads of a rank", fix)


def _token_rule(plan: ParallelPlan, seq_len: int) -> Rule:
    """Returns the rule of what a sequence is cut in: runs of cp ranks, and those over tp."""
    runs = plan.cp if plan.context_parallel == "ulysses" or plan.cp == 1 else 2 * plan.cp
    own = seq_len // plan.cp
    cut = plan.tp if plan.sequence_parallel else 1
    field = "parallel.tp" if seq_len % runs == 0 and cut > 1 else "parallel.cp"
    uneven = seq_len % runs > 0 or own % cut > 0
    value = f"{plan.tp if field == 'parallel.tp' else plan.cp}, of {seq_len} tokens"
    parts = f"{runs} equal runs" if field == "parallel.cp" else f"{plan.cp * cut} equal parts"
    return (field, uneven, value, f"a sequence must come in {parts}")


def _near(value: int, of: int) -> str:
    return " or ".join(map(str, nearest_divisors(value, of)))
