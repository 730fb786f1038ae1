"""Head and cross-entropy in one: the logits never stand in memory."""
