"""FP8 storage of activations."""
