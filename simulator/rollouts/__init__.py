"""Rollout rounds in simulated time."""
