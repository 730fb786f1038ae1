"""DeepSeek sparse attention: latent attention over the positions that an indexer chooses."""
