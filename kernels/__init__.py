"""Operators: one folder each, with reference, cost and, where it pays, a Triton kernel."""
