"""Optimizers: one folder each."""
