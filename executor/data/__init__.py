"""Text, tokenizer, batches."""
