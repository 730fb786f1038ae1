"""Scenarios and clusters as YAML."""
