"""Facts of processors and links."""
