"""Attention over the positions that an indexer chooses for each query."""
