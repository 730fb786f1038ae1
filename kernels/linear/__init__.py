"""Dense matrix product."""
