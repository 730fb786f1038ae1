"""Curves and factors learnt from measurements."""
