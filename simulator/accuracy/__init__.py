"""How well predictions meet measured runs that others published."""
