"""Embedding lookup."""
