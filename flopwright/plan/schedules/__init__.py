"""Pipeline schedules: one file each."""
