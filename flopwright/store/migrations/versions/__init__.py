"""One file a revision; its number is the schema_version of the store."""
