"""Dense feed-forward block."""
