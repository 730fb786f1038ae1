"""Attention residuals: learned mixtures over depth."""
