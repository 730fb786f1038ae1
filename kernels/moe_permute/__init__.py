"""Sorting tokens by expert and back."""
