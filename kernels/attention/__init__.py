"""Causal attention."""
