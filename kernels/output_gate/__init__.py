"""Sigmoid gates on what attention returns, alone or behind a norm of heads."""
