"""Short causal convolution of each channel, with SiLU and a norm of heads."""
