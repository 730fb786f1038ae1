"""The form that says what is planned: a scenario, and what of it is changed."""

from __future__ import annotations

from typing import Any, Final

import streamlit as st
import yaml

from flopwright.dashboards.uploads import uploaded_cluster, uploaded_model
from flopwright.dashboards.view import UPLOADED, View, lines, view_of_address, words_of
from flopwright.errors import InputError
from flopwright.spec.changed import Values, parse_changes
from flopwright.spec.load import (
    CLUSTER_CATALOG,
    MODEL_CATALOG,
    SCENARIO_CATALOG,
    catalog_names,
    load_cluster,
)
from flopwright.spec.scenario import Scenario

FIRST: Final = "kimi_k2_pretrain_2048gpu_h800_bf16"
_AS_IT_IS: Final = "(the scenario's own)"
_OBJECTIVES: Final = ("time", "cost", "energy", "headroom", "gpus")
_GEMM: Final = ("same", "fp8_block", "fp8_tensor", "mxfp8")
_LARGEST: Final = 2**31
# Fields with a control of their own.
_SHOWN: Final = (
    "model",
    "cluster",
    "cluster.num_nodes",
    "workload.seq_len",
    "workload.global_batch_size",
    "objective",
)


def scenario_form(slot: str = "", *, label: str = "Scenario") -> View:
    """Draws the form and returns the view it asks for, kept in the address.

    Raises:
        InputError: the uploaded file, or the address, cannot be read.
    """
    shown = view_of_address(slot) or View(FIRST, (), slot)
    name = _name(slot, label, shown)
    if name != shown.name:
        shown = View(name, (), slot)
    base = shown.base()
    values = _known(shown)
    with st.form(f"{slot}form {name}", border=True):
        chosen, added = _controls(base, values, slot, name)
        rest = words_of({k: v for k, v in values.items() if k not in _SHOWN})
        _start(f"{slot}other {name}", lines(rest))
        other = st.text_area(
            "Other fields, one FIELD=VALUE a line",
            key=f"{slot}other {name}",
            placeholder="search.zero_stage=[1]",
            height=68,
        )
        st.form_submit_button("Plan", type="primary")
    chosen |= parse_changes([w.strip() for w in other.splitlines() if w.strip()])
    view = View(name, words_of(chosen), slot, added)
    view.keep()
    return view


def _name(slot: str, label: str, shown: View) -> str:
    """Returns the scenario: one that ships, or an uploaded file."""
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    upload = right.file_uploader(
        "or your own scenario (YAML, at most 1 MB)", type=["yaml", "yml"], key=f"{slot}file"
    )
    names = catalog_names(SCENARIO_CATALOG)
    if upload is not None:
        st.session_state[f"{slot}upload"] = (upload.name, upload.getvalue())
        left.info(f"{label}: **{upload.name}**, uploaded; take it away to choose another")
        return UPLOADED
    state = f"{slot}choice scenario"
    if st.session_state.get(state) not in names:
        st.session_state[state] = shown.name if shown.name in names else FIRST
    return str(left.selectbox(label, names, key=state))


def _known(shown: View) -> Values:
    try:
        return parse_changes(shown.words)
    except InputError:
        return {}


def _controls(
    base: Scenario, values: Values, slot: str, name: str
) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Draws the controls; returns the changes they ask for, and what was uploaded."""
    key = f"{slot}{name}"
    first, second, third = st.columns(3)
    model = _catalog(first, "Model", MODEL_CATALOG, values.get("model"), base.model.name, key)
    cluster = _catalog(
        second, "Cluster", CLUSTER_CATALOG, values.get("cluster"), base.cluster.name, key
    )
    now = values.get("objective", base.objective)
    _start(f"objective {key}", now if now in _OBJECTIVES else base.objective)
    objective = third.selectbox(
        "Make least",
        _OBJECTIVES,
        key=f"objective {key}",
        help="a step's time, GPU time, energy, memory of the fullest GPU, or GPUs",
    )
    config = first.file_uploader(
        "or a config.json (Hugging Face)", type=["json"], key=f"config {key}"
    )
    own = second.file_uploader(
        "or a cluster (YAML, as `flopwright probe` writes)",
        type=["yaml", "yml"],
        key=f"cluster file {key}",
    )
    nodes_of = load_cluster(cluster) if cluster is not None else base.cluster
    with third:
        nodes = _number("Nodes", "cluster.num_nodes", nodes_of.num_nodes, values, key)
    left, right = st.columns(2)
    with left:
        seq = _number("Context (tokens)", "workload.seq_len", base.workload.seq_len, values, key)
    with right:
        batch = _number(
            "Sequences a step",
            "workload.global_batch_size",
            base.workload.global_batch_size,
            values,
            key,
        )
    asked: dict[str, Any] = {
        "model": model,
        "cluster": cluster,
        "objective": None if objective == base.objective else objective,
        "cluster.num_nodes": nodes,
        "workload.seq_len": seq,
        "workload.global_batch_size": batch,
    }
    added = []
    if config is not None:
        asked["model"] = None
        added.append(("model", _dumped(uploaded_model(config.name, config.getvalue()))))
    if own is not None:
        asked["cluster"] = asked["cluster.num_nodes"] = None
        added.append(("cluster", _dumped(uploaded_cluster(own.name, own.getvalue()))))
    return {k: v for k, v in asked.items() if v is not None}, tuple(added)


def _dumped(data: Any) -> str:
    return yaml.safe_dump(data)


def _start(state: str, value: Any) -> None:
    """Gives a control its first value: without this it would follow the address it writes."""
    if state not in st.session_state:
        st.session_state[state] = value


def _catalog(where: Any, label: str, folder: Any, now: Any, own: str, key: str) -> str | None:
    """Returns the name chosen from a catalog; None for the scenario's own."""
    names = [f"{_AS_IT_IS} {own}", *catalog_names(folder)]
    _start(f"{label} {key}", now if isinstance(now, str) and now in names else names[0])
    chosen = where.selectbox(label, names, key=f"{label} {key}")
    return None if chosen == names[0] else str(chosen)


def _number(label: str, field: str, own: int, values: Values, key: str) -> Any:
    """Returns the number asked for; None where it is the scenario's own."""
    now = values.get(field, own)
    start = now if isinstance(now, int) and not isinstance(now, bool) and now > 0 else own
    state = f"{field} {own} {key}"
    _start(state, start)
    value = st.number_input(label, min_value=1, max_value=_LARGEST, step=1, key=state)
    if value == start != now:
        return now  # what the address says is no such number: the scenario says which rule
    return None if value == own else int(value)
