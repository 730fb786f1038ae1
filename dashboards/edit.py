"""Edit any field of a plan and see the difference."""

from __future__ import annotations

from typing import Any, Final, get_args

import streamlit as st

from flopwright.dashboards import plan_figures
from flopwright.dashboards.depth import predicted
from flopwright.dashboards.parts import chart, show_problems
from flopwright.dashboards.view import View
from flopwright.errors import InputError
from flopwright.plan.parallel import (
    RECOMPUTE_TAGS,
    ContextName,
    ParallelPlan,
    RecomputeName,
    ScheduleName,
)
from flopwright.planner.plan_text import plan_from_fields, plan_from_text, plan_words
from flopwright.report.metrics import Prediction
from flopwright.spec.scenario import Scenario
from flopwright.units import GIB

_NUMBERS: Final = {
    "tp": "tensor parallel",
    "pp": "pipeline stages",
    "vpp": "runs of layers a stage",
    "cp": "context parallel",
    "ep": "expert parallel",
    "etp": "expert tensor parallel",
    "dp_replicate": "replicas of a shard group",
    "micro_batch_size": "sequences a micro-batch",
}
_CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    "zero_stage": (0, 1, 2, 3),
    "schedule": get_args(ScheduleName),
    "recompute": get_args(RecomputeName),
    "context_parallel": get_args(ContextName),
    "data_parallel": get_args(ParallelPlan.model_fields["data_parallel"].annotation),
}
_SWITCHES: Final = tuple(n for n, f in ParallelPlan.model_fields.items() if f.annotation is bool)


def draw_edit(view: View, scenario: Scenario, plan: ParallelPlan) -> None:
    """Draws the form, and what the edited plan changes in time, memory and throughput."""
    try:
        edited = _edited(scenario, plan)
        if edited == plan:
            st.query_params.pop("edit", None)
            st.info("Change a field and price the plan: the difference stands here.")
            return
        own, other = predicted(scenario, plan), predicted(scenario, edited)
    except InputError as error:
        show_problems(error, "The edited plan breaks a rule")
        return
    words = plan_words(edited)
    if st.query_params.get("edit") != words:
        st.query_params["edit"] = words
    st.dataframe(_table(own, other), hide_index=True, width="stretch")
    figure = plan_figures.difference_figure(own.metrics, other.metrics)
    chart(figure, alt="difference by class", command=view.command("plan", "--also", words))
    if st.button("Go on with the edited plan"):
        st.query_params.pop("edit", None)
        st.query_params["plan"] = words
        st.rerun()


def _edited(scenario: Scenario, plan: ParallelPlan) -> ParallelPlan:
    """Returns the plan of the form, which starts at the address's edited plan."""
    text = st.query_params.get("edit", "")
    start = plan_from_text(text, scenario) if "=" in text else plan
    with st.form("edit"):
        fields = _form(start, plan_words(plan))
        st.form_submit_button("Price the edited plan", type="primary")
    # Whatever was not touched stays, also what no control shows as it is.
    shown = _fields(start)
    changed = {name: value for name, value in fields.items() if value != shown[name]}
    return _plan(changed, start, scenario)


def _form(start: ParallelPlan, key: str) -> dict[str, Any]:
    """Returns every field's value as the form has it; data-parallel ranks are what is left."""
    shown = _fields(start)
    fields: dict[str, Any] = {}
    columns = st.columns(4)
    for i, (name, words) in enumerate(_NUMBERS.items()):
        fields[name] = columns[i % 4].number_input(
            f"{words} ({name})", 1, 1_000_000, shown[name], key=f"{name} {key}"
        )
    for i, (name, options) in enumerate(_CHOICES.items()):
        fields[name] = columns[i % 4].selectbox(
            name.replace("_", " "),
            options,
            index=options.index(shown[name]),
            key=f"{name} {key}",
        )
    fields |= _lists(columns, shown, key)
    for i, name in enumerate(_SWITCHES):
        fields[name] = columns[i % 4].checkbox(
            name.replace("_", " "), shown[name], key=f"{name} {key}"
        )
    return fields


def _lists(columns: Any, shown: dict[str, Any], key: str) -> dict[str, Any]:
    """Returns the fields that may be left open: then what is usual."""
    fields: dict[str, Any] = {}
    fields["recompute_layers"] = columns[1].number_input(
        "layers recomputed of each run",
        0,
        1_000_000,
        shown["recompute_layers"],
        key=f"recompute_layers {key}",
        placeholder="all",
        help="of recompute full",
    )
    fields["recompute_tags"] = columns[2].multiselect(
        "what is recomputed",
        RECOMPUTE_TAGS,
        shown["recompute_tags"],
        key=f"recompute_tags {key}",
        placeholder="the usual list",
        help="of recompute selective",
    )
    fields["layers_per_stage"] = columns[3].text_input(
        "layers of each run",
        shown["layers_per_stage"],
        key=f"layers_per_stage {key}",
        placeholder="evenly",
        help="3,4x13,3,3: one number a run of layers; 4x13 is thirteen times 4",
    )
    return fields


def _fields(plan: ParallelPlan) -> dict[str, Any]:
    """Returns the plan's fields as the form shows them."""
    names = (*_NUMBERS, *_CHOICES, *_SWITCHES, "recompute_layers")
    return {
        **{name: getattr(plan, name) for name in names},
        "recompute_tags": list(plan.recompute_tags),
        "layers_per_stage": ",".join(map(str, plan.layers_per_stage or ())),
    }


def _plan(changed: dict[str, Any], plan: ParallelPlan, scenario: Scenario) -> ParallelPlan:
    """Returns the plan with the changes; lists stay while they still mean something."""
    if not changed:
        return plan
    fields = {name: getattr(plan, name) for name in ParallelPlan.model_fields} | changed
    del fields["dp_shard"]
    if {"pp", "vpp"} & set(changed) and "layers_per_stage" not in changed:
        fields["layers_per_stage"] = None
    if "recompute" in changed:
        fields["recompute_tags"] = changed.get("recompute_tags", ())
        fields["recompute_layers"] = changed.get("recompute_layers")
    fields["layers_per_stage"] = fields["layers_per_stage"] or None
    return plan_from_fields(fields, scenario)


def _table(own: Prediction, other: Prediction) -> list[dict[str, str]]:
    rows = (
        ("step time (s)", own.metrics.step_time_s, other.metrics.step_time_s),
        (
            "tokens/s a GPU",
            own.metrics.tokens_per_s_per_gpu,
            other.metrics.tokens_per_s_per_gpu,
        ),
        ("MFU (%)", 100 * own.metrics.mfu, 100 * other.metrics.mfu),
        (
            "peak memory (GiB)",
            own.metrics.peak_memory_bytes / GIB,
            other.metrics.peak_memory_bytes / GIB,
        ),
    )
    return [
        {
            "": name,
            "this plan": f"{before:.4g}",
            "edited": f"{after:.4g}",
            "change": f"{after / before - 1:+.1%}" if before else "-",
        }
        for name, before, after in rows
    ]
