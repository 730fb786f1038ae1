"""A plan as words: "pp=16 ep=16 zero=1 recompute=selective fp8_activations"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.scenario import Scenario

_SHORT: Final = {"zero": "zero_stage", "mbs": "micro_batch_size", "dp": "dp_shard"}
_LISTS: Final = ("layers_per_stage", "recompute_tags")


def plan_from_text(text: str, scenario: Scenario) -> ParallelPlan:
    """Returns the plan that a line of `name=value` words tells; a name alone is "on".

    Names are ParallelPlan's fields, or zero, mbs and dp. Data-parallel ranks that are not
    given take all GPUs that are left; layers_per_stage may be "3,4x13,3,3".

    Raises:
        InputError: an unknown name or a value that is none.
    """
    given: dict[str, Any] = {}
    found: list[Violation] = []
    names = (*ParallelPlan.model_fields, *_SHORT)
    for word in text.split():
        name, equals, value = word.partition("=")
        if name not in names:
            fix = did_you_mean(name, names)
            found.append(Violation(field=name, rule="not a field of a plan", nearest_fix=fix))
            continue
        value = value if equals else "true"
        given[_SHORT.get(name, name)] = int(value) if value.isdecimal() else value
    if found:
        raise InputError(found)
    return plan_from_fields(given, scenario)


def plan_from_fields(given: Mapping[str, Any], scenario: Scenario) -> ParallelPlan:
    """Returns a plan of some fields, all GPUs that are left data-parallel.

    Raises:
        InputError: a value that is none.
    """
    fields: dict[str, Any] = dict(given)
    for name in _LISTS:
        if isinstance(fields.get(name), str):
            fields[name] = _list(fields[name], number=name == "layers_per_stage")
    if fields.get("recompute_tags"):
        fields.setdefault("recompute", "selective")
    if "vpp" in fields and "schedule" not in fields and str(fields["vpp"]) != "1":
        fields["schedule"] = "interleaved_1f1b"
    plan = _validated(fields)
    if "dp_shard" not in fields:
        ranks = plan.tp * plan.pp * plan.cp * plan.dp_replicate
        shard = max(1, scenario.cluster.num_gpus // ranks)
        plan = plan.model_copy(update={"dp_shard": shard})
    return plan


def _validated(fields: dict[str, Any]) -> ParallelPlan:
    try:
        return ParallelPlan.model_validate(fields)
    except ValidationError as error:
        raise InputError(
            [
                Violation(
                    field=f"parallel.{'.'.join(map(str, e['loc']))}",
                    value=str(e["input"]),
                    rule=e["msg"],
                )
                for e in error.errors()
            ]
        ) from error


def _list(text: str, *, number: bool) -> tuple[str, ...]:
    """Returns "3,4x2" as ("3", "4", "4"); words that are no numbers stand for themselves."""
    out: list[str] = []
    for part in filter(None, text.split(",")):
        value, times, count = part.partition("x")
        if number and times and count.isdigit() and len(count) < 4:
            out += [value] * int(count)
        else:
            out.append(part)
    return tuple(out)


def plan_words(plan: ParallelPlan) -> str:
    """Returns the words that `plan_from_text` reads back as an equal plan."""
    words = []
    for name, field in ParallelPlan.model_fields.items():
        value = getattr(plan, name)
        if value == field.default and name != "dp_shard":
            continue
        if isinstance(value, bool):
            words.append(name if value else f"{name}=false")
        elif isinstance(value, tuple):
            words.append(f"{name}={','.join(map(str, value))}")
        else:
            words.append(f"{name}={value}")
    return " ".join(words)
