"""Where measurements are kept."""

from flopwright.store.database import Store, default_url, open_store

__all__ = ["Store", "default_url", "open_store"]
