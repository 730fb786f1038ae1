"""Parallelism as planned."""
