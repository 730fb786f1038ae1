"""What Newton-Schulz costs. Two of the three products of an iteration are symmetric."""

from __future__ import annotations

ITERATIONS = 5
TILE = 128  # of the symmetric kernel


def newton_schulz_flops(rows: int, columns: int, kernel: str = "reference") -> float:
    """Returns the FLOPs of one matrix with sides A <= B.

    Whole products: 5 * (4 * A^2 * B + 2 * A^3), for X X^T, its square, and times X. The
    "triton" kernel makes only the tiles of the symmetric products on and below the diagonal:
    n (n + 1) / 2 of n^2 tiles.
    """
    a, b = sorted((rows, columns))
    share = 1.0
    if kernel == "triton":
        n = -(-a // TILE)
        share = (n + 1) / (2 * n)
    return ITERATIONS * (2.0 * a * a * b * (1 + share) + 2.0 * a**3 * share)
