"""RMSNorm layer."""
