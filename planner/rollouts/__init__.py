"""Planning an RL loop: what generates, what trains, when a round ends, and what it costs."""
