"""Explore's serving tab: fewest GPUs that serve a model, tokens a second, money a task."""

from __future__ import annotations

from typing import Final, get_args

import streamlit as st

from flopwright.dashboards import figures
from flopwright.dashboards.parts import chart, chosen, keep_in_url, number
from flopwright.planner.serving.serve import Asked, Serving, serve
from flopwright.simulator.hardware.nodes.types import node_type_names
from flopwright.simulator.rollouts.engine.catalog import (
    load_served,
    named_formats,
    served_model_names,
)
from flopwright.spec.load import MODEL_CATALOG, catalog_names
from flopwright.spec.rollouts.engine_served import FormatName
from flopwright.units import plural, show_bytes, show_count, show_seconds

_AS_RELEASED: Final = "as the model says"
_FIRST_NODE: Final = "hgx_h200"


def draw_serving(model: str) -> None:
    """Draws the form and the answer, as `flopwright recommend --serve` gives it.

    Args:
        model: of the scenario; what the tab starts with where it is one of the catalog's.

    Raises:
        InputError: a count that cannot be.
    """
    names = [*served_model_names(), *catalog_names(MODEL_CATALOG)]
    left, middle, right = st.columns(3)
    with left:
        name = chosen("Model to serve", names, "serve", model)
        context = number("Context to hold (tokens)", "context", 1, 10_000_000, 131_072)
    with middle:
        node = chosen("Node type", list(node_type_names()), "node", _FIRST_NODE)
        users = number("Sequences at once", "users", 1, 1_000_000, 64)
    with right:
        formats = [_AS_RELEASED, *get_args(FormatName)]
        release = chosen("Weight format", formats, "release")
        models = number("Models kept loaded behind a router", "models", 1, 100, 1)
    keep_in_url(serve=name, node=node, release=release)
    wanted = None if release == _AS_RELEASED else release
    asked = Asked(node_type=node, context=context, concurrency=users, models=models)
    found = serve(load_served(name, *named_formats(wanted, None)), asked)
    _drawn(found, _command(name, node, wanted, asked))


def _command(name: str, node: str, release: str | None, asked: Asked) -> list[str]:
    """Returns the command line of the same question."""
    words = ["flopwright", "recommend", "--serve", name, "--node", node]
    words += ["--release", release] if release is not None else []
    words += ["--context", str(asked.context), "--concurrency", str(asked.concurrency)]
    return [*words, "--experts", str(asked.models)]


def _drawn(found: Serving, command: list[str]) -> None:
    alone = f"the weights alone ({show_bytes(found.weight_bytes)}) need "
    alone += f"{plural(found.gpus_for_weights, 'GPU')} ({found.gpu})"
    if not found.gpus:
        st.error(f"**No number of GPUs that was looked at holds it with its caches**; {alone}")
        return
    holds = "holds" if found.gpus == 1 else "hold"
    text = f"**{plural(found.gpus, 'GPU')}** {holds} it with its caches: {found.layout}; {alone}"
    st.success(text)
    columns = st.columns(4)
    columns[0].metric("tokens/s a GPU", show_count(found.tokens_per_s_per_gpu))
    columns[1].metric("tokens/s a user", show_count(found.tokens_per_s_per_user))
    columns[2].metric("sequences it can hold", f"{found.sequences:,}")
    money = found.usd_per_million_tokens
    columns[3].metric("USD a million tokens", "-" if money is None else f"{money:.3g}")
    st.dataframe(
        [
            {
                "effort": level,
                "time of a task": show_seconds(seconds),
                "USD a task": round(found.usd_per_task[level], 4) if found.usd_per_task else None,
            }
            for level, seconds in found.seconds_per_task.items()
        ],
        hide_index=True,
        width="stretch",
    )
    figure = figures.task_time_figure(found.seconds_per_task)
    chart(figure, alt="time of a task by effort", command=command)
    with st.expander("Assumptions"):
        st.markdown("\n".join(f"- {text}" for text in found.assumptions))
