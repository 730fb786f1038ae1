"""Vision towers: priced, not trained."""
