"""The square of relu."""
