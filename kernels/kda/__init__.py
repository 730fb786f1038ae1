"""Kimi Delta Attention: linear attention with a delta rule and a decay by channel."""
