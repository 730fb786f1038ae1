"""Low-rank adapters (arXiv 2106.09685)."""
