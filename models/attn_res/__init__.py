"""Attention residuals: what a sub-layer reads is a mixture over depth."""
