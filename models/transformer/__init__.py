"""The decoder-only transformer, assembled from blocks."""
