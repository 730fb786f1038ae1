"""Time of one collective."""
