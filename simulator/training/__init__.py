"""A training step in simulated time."""
