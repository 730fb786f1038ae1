"""Microscaling formats: what MXFP4 and MXFP8 make of a number."""
