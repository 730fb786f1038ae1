"""Multi-token prediction: what stands before the module's layer."""
