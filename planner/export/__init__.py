"""Plans as files that launch them: one file a target."""
