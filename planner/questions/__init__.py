"""Questions about a plan, each answered by pricing other plans."""
