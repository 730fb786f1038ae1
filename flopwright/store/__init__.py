"""Where measurements are kept."""
