"""Where measurements are kept."""

from flopwright.store.database import Store, default_url, open_store, store_exists

__all__ = ["Store", "default_url", "open_store", "store_exists"]
