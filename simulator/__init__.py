"""The interpreter in simulated time."""
