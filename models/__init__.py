"""Model blocks: one folder each with the module that trains and what it costs."""
