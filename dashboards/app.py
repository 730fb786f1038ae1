"""The dashboard: five pages over the same functions as the command line."""

from __future__ import annotations

import streamlit as st

from flopwright.dashboards.app_pages.compare import page as compare
from flopwright.dashboards.app_pages.explore import page as explore
from flopwright.dashboards.app_pages.export import page as export
from flopwright.dashboards.app_pages.plan import page as plan
from flopwright.dashboards.app_pages.rollouts import page as rollouts

st.set_page_config(page_title="flopwright", layout="wide", menu_items={})
st.navigation(
    [
        st.Page(explore, title="Explore", url_path="explore", default=True),
        st.Page(plan, title="Plan", url_path="plan"),
        st.Page(rollouts, title="Rollouts", url_path="rollouts"),
        st.Page(compare, title="Compare", url_path="compare"),
        st.Page(export, title="Export", url_path="export"),
    ],
    position="top",
).run()
