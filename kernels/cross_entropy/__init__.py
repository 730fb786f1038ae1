"""Cross-entropy loss."""
