"""The form that says what is planned: a scenario, and what of it is changed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import streamlit as st
import yaml

from flopwright.dashboards.parts import opened
from flopwright.dashboards.uploads import uploaded_cluster, uploaded_model
from flopwright.dashboards.view import PROBED, UPLOADED, View, lines, view_of_address, words_of
from flopwright.errors import InputError
from flopwright.simulator.calibration.machines import load_machine, machine_names
from flopwright.spec.changed import Values, parse_changes
from flopwright.spec.cluster import ClusterSpec
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
    choice = st.container()
    with opened("Your own scenario, model or cluster", f"{slot}own", stays=True) as wanted:
        boxes = st.columns(3) if wanted else []
    name = _name(choice, boxes[:1], slot, label, shown)
    if name != shown.name:
        shown = View(name, (), slot)
    base = shown.base()
    values = _known(shown)
    with st.form(f"{slot}form {name}", border=True):
        chosen = _controls(base, values, slot, name)
        with st.container(horizontal=True):
            st.form_submit_button("Plan", type="primary")
            with st.popover("Any other field"):
                other = _other(values, slot, name)
    added = _uploads(boxes[1:], f"{slot}{name}")
    # What was uploaded takes the place of what was chosen.
    uploaded = {field for field, _ in added}
    chosen = {k: v for k, v in chosen.items() if k.split(".")[0] not in uploaded}
    chosen |= parse_changes([w.strip() for w in other.splitlines() if w.strip()])
    view = View(name, words_of(chosen), slot, added)
    view.keep()
    _about(view)
    return view


def _name(choice: Any, boxes: Sequence[Any], slot: str, label: str, shown: View) -> str:
    """Returns the scenario: one that ships, or an uploaded file.

    Args:
        boxes: where a file can be uploaded, where that place is open.
    """
    upload = None
    for box in boxes:
        upload = box.file_uploader(
            "A scenario (YAML, at most 1 MB)", type=["yaml", "yml"], key=f"{slot}file"
        )
    names = catalog_names(SCENARIO_CATALOG)
    if upload is not None:
        st.session_state[f"{slot}upload"] = (upload.name, upload.getvalue())
        choice.info(f"{label}: **{upload.name}**, uploaded; take it away to choose another")
        return UPLOADED
    first = shown.name if shown.name in names else FIRST
    key = f"{slot}choice scenario"
    return str(choice.selectbox(label, names, index=names.index(first), key=key))


def _about(view: View) -> None:
    """Says what a scenario that is not all in the address needs, and offers it as a file."""
    scenario = view.scenario()
    if view.is_upload:
        st.caption(
            "Uploaded and probed data stay in this session: the address alone does not reopen "
            f"them. The command lines below read the downloaded file, `{scenario.name}.yaml`."
        )
    st.download_button(
        "Download this scenario (YAML)",
        view.yaml,
        file_name=f"{scenario.name}.yaml",
        mime="application/yaml",
        key=f"{view.slot}download",
        on_click="ignore",
    )


def _known(shown: View) -> Values:
    try:
        return parse_changes(shown.words)
    except InputError:
        return {}


def _other(values: Values, slot: str, name: str) -> str:
    """Draws the box for fields without a control of their own; returns its lines."""
    rest = words_of({k: v for k, v in values.items() if k not in _SHOWN})
    text = st.text_area(
        "Other fields, one FIELD=VALUE a line",
        lines(rest),
        key=f"{slot}other {name}",
        placeholder="search.zero_stage=[1]",
        height=68,
        help="any field of a scenario file by its dotted name; `flopwright schema scenario`",
    )
    return str(text)


def _controls(base: Scenario, values: Values, slot: str, name: str) -> dict[str, Any]:
    """Draws the controls; returns the changes they ask for."""
    key = f"{slot}{name}"
    first, second, third = st.columns(3)
    models = catalog_names(MODEL_CATALOG)
    model = _catalog(first, "Model", models, values.get("model"), base.model.name, key)
    clusters = [*(f"{PROBED}{n}" for n in machine_names()), *catalog_names(CLUSTER_CATALOG)]
    cluster = _catalog(second, "Cluster", clusters, values.get("cluster"), base.cluster.name, key)
    now = values.get("objective", base.objective)
    objective = third.selectbox(
        "Make least",
        _OBJECTIVES,
        index=_OBJECTIVES.index(now if now in _OBJECTIVES else base.objective),
        key=f"objective {key}",
        help="a step's time, GPU time, energy, memory of the fullest GPU, or GPUs",
    )
    nodes, seq, batch = _sizes(base, values, key, cluster)
    asked: dict[str, Any] = {
        "model": model,
        "cluster": cluster,
        "objective": None if objective == base.objective else objective,
        "cluster.num_nodes": nodes,
        "workload.seq_len": seq,
        "workload.global_batch_size": batch,
    }
    return {k: v for k, v in asked.items() if v is not None}


def _sizes(base: Scenario, values: Values, key: str, cluster: str | None) -> tuple[Any, Any, Any]:
    """Draws the numbers: nodes, context, sequences a step."""
    nodes_of = base.cluster if cluster is None else _cluster(cluster)
    first, second, third = st.columns(3)
    with first:
        nodes = _number("Nodes", "cluster.num_nodes", nodes_of.num_nodes, values, key)
    with second:
        seq = _number("Context (tokens)", "workload.seq_len", base.workload.seq_len, values, key)
    with third:
        batch = _number(
            "Sequences a step",
            "workload.global_batch_size",
            base.workload.global_batch_size,
            values,
            key,
        )
    return nodes, seq, batch


def _uploads(boxes: Sequence[Any], key: str) -> tuple[tuple[str, str], ...]:
    """Draws the uploads of a model and of a cluster; returns by field what was uploaded.

    Args:
        boxes: a place for each, where they are open.
    """
    if not boxes:
        return ()
    model, cluster = boxes
    config = model.file_uploader(
        "A model: config.json (Hugging Face, at most 1 MB)", type=["json"], key=f"config {key}"
    )
    own = cluster.file_uploader(
        "A cluster: YAML, as `flopwright probe` writes (at most 1 MB)",
        type=["yaml", "yml"],
        key=f"cluster file {key}",
    )
    added = []
    if config is not None:
        added.append(("model", yaml.safe_dump(uploaded_model(config.name, config.getvalue()))))
    if own is not None:
        added.append(("cluster", yaml.safe_dump(uploaded_cluster(own.name, own.getvalue()))))
    return tuple(added)


def _cluster(name: str) -> ClusterSpec:
    if name.startswith(PROBED):
        return load_machine(name.removeprefix(PROBED))
    return _shipped_cluster(name)


@lru_cache(maxsize=64)
def _shipped_cluster(name: str) -> ClusterSpec:
    return load_cluster(name)


def _catalog(where: Any, label: str, known: list[str], now: Any, own: str, key: str) -> str | None:
    """Returns the name chosen from a catalog; None for the scenario's own."""
    names = [f"{_AS_IT_IS} {own}", *known]
    first = names.index(now) if isinstance(now, str) and now in names else 0
    chosen = where.selectbox(label, names, index=first, key=f"{label} {key}")
    return None if chosen == names[0] else str(chosen)


def _number(label: str, field: str, own: int, values: Values, key: str) -> Any:
    """Returns the number asked for; None where it is the scenario's own."""
    now = values.get(field, own)
    start = now if isinstance(now, int) and not isinstance(now, bool) and now > 0 else own
    value = st.number_input(label, 1, _LARGEST, start, step=1, key=f"{field} {own} {key}")
    if value == start != now:
        return now  # what the address says is no such number: the scenario says which rule
    return None if value == own else int(value)
