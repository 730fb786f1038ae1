"""Configurations of running jobs, read into a scenario and a plan."""
