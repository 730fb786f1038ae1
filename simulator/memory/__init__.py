"""Bytes of a rank by class."""
