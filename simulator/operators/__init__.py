"""Time of one operator."""
