"""Published RL and serving measurements beside predictions."""
