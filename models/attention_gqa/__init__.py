"""Grouped-query and multi-head attention."""
