"""Short-lived tensors of the backward pass."""
