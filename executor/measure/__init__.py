"""Timers, memory accounting and probes."""
