"""Runs a rank's step without its tensors' values: shapes, groups and lists are the real ones."""
