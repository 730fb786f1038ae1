"""Histograms from which quantile balancing reads its biases."""
