"""Linear projection layer."""
