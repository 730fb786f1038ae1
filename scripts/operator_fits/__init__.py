"""Fits of efficiency curves to public operator tables."""
