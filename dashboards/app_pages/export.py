"""Export: choose targets, see the files and the checks each passed, download one zip."""

from __future__ import annotations

from typing import Final

import streamlit as st

from flopwright.dashboards import figures
from flopwright.dashboards.depth import predicted
from flopwright.dashboards.exported import Bundle, made_bundle, spare_plans
from flopwright.dashboards.parts import chart, cli_line, keep_in_url, number, show_problems
from flopwright.dashboards.plan_choice import chosen_plan
from flopwright.dashboards.view import View
from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.export.registry import TARGETS
from flopwright.planner.export.target import TARGET_VERSIONS
from flopwright.spec.scenario import Scenario
from flopwright.units import plural, show_bytes

_LANGUAGES: Final = {".json": "json", ".yaml": "yaml", ".sh": "bash", ".toml": "toml"}
_LONGEST: Final = 20_000


def page() -> None:
    """Draws the page."""
    st.title("Export")
    st.caption(
        "The files that launch a plan, with its expected numbers and the bounds it is judged by."
    )
    try:
        choice = chosen_plan()
        if choice is None:
            return
        view, scenario, plan = choice
        targets, image, count = _form()
        spare = spare_plans(scenario, plan, count)
        with st.spinner("writing the files"):
            made = made_bundle(scenario, plan, targets, image, spare or ())
    except InputError as error:
        show_problems(error, "This plan cannot be exported so")
        return
    hbm_bytes = scenario.cluster.node.gpu.hbm_bytes
    if (lacks := predicted(scenario, plan).metrics.peak_memory_bytes - hbm_bytes) > 0:
        st.error(f"**This plan does not fit:** it lacks {show_bytes(lacks)} a GPU")
    failed = [c.name for c in made.checks if c.failed]
    if failed:
        st.error(f"**{plural(len(failed), 'file')} failed its check:** {', '.join(failed)}")
    else:
        st.success(f"**{plural(len(made.files), 'file')}**, each read back and found sound")
    st.download_button(
        f"Download the bundle ({show_bytes(len(made.archive))} zip)",
        made.archive,
        file_name=f"{scenario.name}.zip",
        mime="application/zip",
        type="primary",
        on_click="ignore",
    )
    _notes(made)
    _files(made)
    _command(targets, image, count)
    _expected(view, scenario, plan)


def _form() -> tuple[tuple[str, ...], str | None, int]:
    """Returns the targets, the container image and how many fallback plans; all in the address."""
    known = [t for t in st.query_params.get_all("target") if t in TARGETS]
    with st.form("targets"):
        targets = st.multiselect(
            "Further launchers and frameworks, beside torchrun, Slurm and DeepSpeed",
            sorted(TARGETS),
            known,
            key="targets",
            format_func=lambda name: f"{name} ({TARGET_VERSIONS.get(name, '')})",
        )
        left, right = st.columns(2)
        image = left.text_input(
            "Container image, for kubeflow, dstack and skypilot",
            st.query_params.get("image", ""),
            key="image",
            placeholder="registry/image:tag",
        )
        with right:
            spare = number(
                "Plans for fewer nodes", "fallbacks", 0, 10, 0, about="each is searched"
            )
        st.form_submit_button("Write the files", type="primary")
    if st.query_params.get_all("target") != targets:
        st.query_params["target"] = targets
    keep_in_url(image=image)
    return tuple(targets), image or None, int(spare)


def _notes(made: Bundle) -> None:
    """Says what a target leaves out and what our own executor would refuse."""
    for name, texts in made.omitted.items():
        st.warning(f"`{name}` does not say: " + "; ".join(texts))
    if made.refused:
        st.info(f"`flopwright run` does not run this plan yet: {', '.join(made.refused)}")


def _files(made: Bundle) -> None:
    """Draws every file with the checks it passed, and its text."""
    st.dataframe(
        [
            {
                "file": c.name,
                "size (bytes)": c.size_bytes,
                "check": "failed" if c.failed else "passed",
                "what was checked": c.failed or "; ".join(c.passed),
            }
            for c in made.checks
        ],
        hide_index=True,
        width="stretch",
        height="content",
    )
    with st.expander("Look into a file"):
        name = st.selectbox("File", [n for n in made.files if not n.endswith(".gz")])
        text = made.files[name].decode("utf-8")
        if len(text) > _LONGEST:
            st.caption(f"the first {_LONGEST:,} characters")
        suffix = "." + name.rsplit(".", 1)[-1]
        st.code(text[:_LONGEST], language=_LANGUAGES.get(suffix, "markdown"))


def _command(targets: tuple[str, ...], image: str | None, spare: int) -> None:
    """Shows the command line that writes the same files."""
    words = [w for t in targets for w in ("--target", t)]
    words += ["--image", image] if image else []
    cli_line(
        ["flopwright", "export", "plan.yaml", "--to", "bundle", *words, "--fallbacks", str(spare)]
    )
    st.caption("`plan.yaml` is what *Download plan.yaml* of the Plan page gives.")


def _expected(view: View, scenario: Scenario, plan: ParallelPlan) -> None:
    """Draws what the launched run is expected to show: check.json holds the same numbers."""
    st.subheader("What the run should show")
    found = predicted(scenario, plan)
    command = view.command("simulate", "--plan", "plan.yaml")
    left, right = st.columns(2)
    with left:
        figure = figures.step_time_figure({plan.label(): found})
        chart(figure, alt="expected step time by class", command=command)
    with right:
        figure = figures.memory_figure(found.metrics, scenario.cluster.node.gpu.hbm_bytes)
        chart(figure, alt="expected memory by stage", command=command)
