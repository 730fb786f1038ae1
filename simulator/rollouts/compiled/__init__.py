"""The event loop of rollout phases in machine code (numba); its log equals the reference's."""
