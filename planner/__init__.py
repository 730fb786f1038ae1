"""Search for plans, and why they win."""
