"""What an RL rollout workload and a generation engine are."""
