"""Norm layers."""
