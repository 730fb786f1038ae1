"""What documents packed in rows ask of a plan and a model to be run here."""

from __future__ import annotations

from collections.abc import Iterable

from flopwright.plan.file import PlanFile
from flopwright.spec.model import GqaAttention, MlaAttention

Rule = tuple[str, bool, str, str]  # field, whether it is asked for, its value, what to do
_FIELD = "workload.packing"


def packing_rules(plan: PlanFile) -> Iterable[Rule]:
    """Yields the rules of workload.packing."""
    p, model, packed = plan.parallel, plan.scenario.model, plan.scenario.workload.packing
    asked, attention = packed is not None, model.attention
    whole = "use 1: a rank would need the documents of other ranks' tokens"
    yield (_FIELD, asked and p.cp > 1, f"documents, with cp {p.cp}", whole)
    apart = p.tp > 1 and p.sequence_parallel and p.micro_batch_size > 1
    value = f"documents, with sequence_parallel and micro_batch_size {p.micro_batch_size}"
    yield (
        _FIELD,
        asked and apart,
        value,
        "use micro_batch_size 1: a rank's tokens are of one row",
    )
    fix = "use false: that loss has no weights of tokens"
    yield (_FIELD, asked and p.fused_loss, "documents, with fused_loss", fix)
    mtp = model.mtp_layers
    fix = "leave it out: targets further ahead would be of other documents"
    yield (_FIELD, asked and mtp > 0, f"documents, with mtp_layers {mtp}", fix)
    sinks = isinstance(attention, GqaAttention) and attention.sinks
    indexed = isinstance(attention, MlaAttention) and attention.indexer is not None
    value = f"documents, with {'attention sinks' if sinks else 'an indexer'}"
    yield (_FIELD, asked and (sinks or indexed), value, "leave it out")
