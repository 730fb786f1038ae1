"""QK-Clip: attention logits bounded by scaling the weights that make them."""
