"""The interpreter in real time."""
