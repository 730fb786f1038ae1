"""Saved state: safetensors and JSON."""
