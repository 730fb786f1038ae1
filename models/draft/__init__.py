"""Draft heads for speculative decoding."""
