"""The loss of draft heads: -log of the overlap of two next-token distributions."""
