"""The server of the dashboard: everything a first page needs is there before it listens.

    python -m flopwright.dashboards.serve [--server.port=8501 and any other Streamlit option]

`streamlit run dashboards/app.py` serves the same pages; there the first visitor waits for the
imports, and the browser for one script after the other.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware

from flopwright.dashboards.preload import Preload

# Streamlit looks into this file for an application of this name.
app = st.App(Path(__file__).with_name("app.py"), middleware=[Middleware(Preload)])


def get_ready() -> None:
    """Imports the pages and answers what the first page asks."""
    from flopwright.dashboards.app_pages import compare, explore, export, plan, rollouts  # noqa: F401
    from flopwright.dashboards.jobs import jobs
    from flopwright.dashboards.warm import first_page, rest_later

    jobs().get_ready()
    first_page()
    # What is there now stays: later collections need not look at it.
    gc.collect()
    gc.freeze()
    rest_later()


def main() -> None:
    """Serves until it is ended."""
    from streamlit.web import cli

    get_ready()
    cli.main(["run", __file__, *sys.argv[1:]])


if __name__ == "__main__":
    main()
