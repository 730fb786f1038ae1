"""One matrix product an expert."""
