"""Logs of other programs, read into records: training steps, rounds, engine lines, kernels."""
