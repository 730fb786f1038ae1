"""What it takes to serve a model: GPUs, tokens a second, money."""
