"""Predictions beside measurements: what a run's parts were predicted to take, and what is slow."""
