"""Edit any field of a plan and see the difference."""

from __future__ import annotations

from typing import Any, Final, get_args

import streamlit as st

from flopwright.dashboards import plan_figures
from flopwright.dashboards.depth import predicted
from flopwright.dashboards.parts import chart, show_problems
from flopwright.dashboards.view import View
from flopwright.errors import InputError
from flopwright.plan.parallel import ContextName, ParallelPlan, RecomputeName, ScheduleName
from flopwright.planner.plan_text import plan_from_fields, plan_words
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
}
_SWITCHES: Final = (
    "sequence_parallel",
    "fp8_activations",
    "activation_offload",
    "optimizer_offload",
    "gradient_offload",
    "parameter_offload",
)


def draw_edit(view: View, scenario: Scenario, plan: ParallelPlan) -> None:
    """Draws the form, and what the edited plan changes in time, memory and throughput."""
    with st.form("edit"):
        fields = _form(plan)
        st.form_submit_button("Price the edited plan", type="primary")
    try:
        edited = _plan(fields, plan, scenario)
        if edited == plan:
            st.info("Change a field and price the plan: the difference stands here.")
            return
        own, other = predicted(scenario, plan), predicted(scenario, edited)
    except InputError as error:
        show_problems(error, "The edited plan breaks a rule")
        return
    st.dataframe(_table(own, other), hide_index=True, width="stretch")
    command = view.command("plan", "--also", plan_words(edited))
    figure = plan_figures.difference_figure(own.metrics, other.metrics)
    chart(figure, alt="difference by class", command=command)
    if st.button("Go on with the edited plan"):
        st.query_params["plan"] = plan_words(edited)
        st.rerun()


def _form(plan: ParallelPlan) -> dict[str, Any]:
    """Returns every field's value as the form has it."""
    key = plan_words(plan)
    fields: dict[str, Any] = {}
    columns = st.columns(4)
    for i, (name, words) in enumerate(_NUMBERS.items()):
        fields[name] = columns[i % 4].number_input(
            f"{words} ({name})", 1, 1_000_000, getattr(plan, name), key=f"{name} {key}"
        )
    for i, (name, options) in enumerate(_CHOICES.items()):
        fields[name] = columns[i % 4].selectbox(
            name.replace("_", " "),
            options,
            index=options.index(getattr(plan, name)),
            key=f"{name} {key}",
        )
    for i, name in enumerate(_SWITCHES):
        fields[name] = columns[i % 4].checkbox(
            name.replace("_", " "), getattr(plan, name), key=f"{name} {key}"
        )
    return fields


def _plan(fields: dict[str, Any], plan: ParallelPlan, scenario: Scenario) -> ParallelPlan:
    """Returns the edited plan; the layer split and lists stay while they still mean something."""
    kept: dict[str, Any] = {"data_parallel": plan.data_parallel}
    if fields["pp"] == plan.pp and fields["vpp"] == plan.vpp:
        kept["layers_per_stage"] = plan.layers_per_stage
    if fields["recompute"] == plan.recompute:
        kept |= {"recompute_tags": plan.recompute_tags, "recompute_layers": plan.recompute_layers}
    return plan_from_fields({**fields, **kept}, scenario)


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
