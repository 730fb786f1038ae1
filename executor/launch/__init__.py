"""Starting ranks; imports no torch."""
