"""LayerNorm."""
