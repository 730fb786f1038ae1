"""What is decided: the plan, its groups, shards, schedules and lowered lists."""
