"""What comes out: metrics, predictions, measurements, traces, comparisons."""
