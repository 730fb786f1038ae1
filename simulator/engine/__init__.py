"""The event engine: SimPy in seconds."""
