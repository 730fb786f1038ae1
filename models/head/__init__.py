"""Output head and loss."""
