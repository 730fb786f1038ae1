"""The generation engine: seconds of a prefill and of a decode step, and what the cache holds."""
