"""The Streamlit dashboard: no arithmetic of its own."""
