"""Mixture of experts: router, routed experts, shared experts, dispatch protocol."""
