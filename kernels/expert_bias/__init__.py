"""Biases of routed experts."""
