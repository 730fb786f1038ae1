"""flopwright: one plan, two interpreters (a simulator and an executor)."""

__version__ = "0.1.0"
