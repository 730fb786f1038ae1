"""What Kimi Delta Attention costs: what is executed, and the convention of its paper."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.ops import Array, CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES

CHUNK = 16
PAPER_CHUNK = 64


def reported_flops(tokens: ArrayLike, width: int, chunk: int = PAPER_CHUNK) -> Array:
    """Returns 6 T d^2 + 3 T C d + T C^2 a head and sequence (arXiv 2510.26692, equation 13)."""
    t = np.asarray(tokens, float)
    return np.asarray(6 * t * width**2 + 3 * t * chunk * width + t * chunk**2)


def chunk_flops(k_width: int, v_width: int) -> tuple[float, float]:
    """Returns the FLOPs of products of one chunk: (forward, backward without the forward).

    Forward: keys and queries times the state, keys times the changes (6 C K V), the pairs of
    the chunk (4 C^2 K, on and above the diagonal too), its inverse (4 C^3 a doubling, three
    of them) and twice a matrix of C x C times the changes (4 C^2 V). Backward makes the
    forward's chunk again but for its results (`backward_again`), six products with a state or
    its gradient (12 C K V), four of C x C with C x V (8 C^2 V) and the pairs' gradients
    (8 C^2 K).
    """
    c, k, v = CHUNK, k_width, v_width
    forward = 6.0 * c * k * v + 4.0 * c * c * k + 4.0 * c**3 * 3 + 4.0 * c * c * v
    backward = 12.0 * c * k * v + 8.0 * c * c * v + 8.0 * c * c * k
    again = 2.0 * c * k * v + 4.0 * c * c * k + 4.0 * c**3 * 3 + 2.0 * c * c * v
    return forward, backward + again


def kda(
    cost: CostBuilder, name: str, *, sequences: ArrayLike, seq_len: ArrayLike, heads: ArrayLike,
    k_width: int, v_width: int, dtype: str, kernel: str = "triton",
) -> None:  # fmt: skip
    """Adds the forward row, and the backward row with the forward pass that makes the states.

    The "library" kernel is fla's: chunks of 64, whose FLOPs are those that the paper reports;
    our op runs its forward pass again for its backward (two more times the forward's).

    Programs of one head share its width of values; what each makes for itself (pairs and
    inverse) is counted once.
    """
    b, s, h = (np.asarray(x, float) for x in (sequences, seq_len, heads))
    size = PAPER_CHUNK if kernel == "library" else CHUNK
    t, chunks = b * s * h, b * h * np.ceil(s / size)
    width = DTYPE_BYTES[dtype]
    inputs = t * ((2 * k_width + v_width) * width + (k_width + 1) * DTYPE_BYTES["fp32"])
    out, state = t * v_width * width, b * h * k_width * v_width * DTYPE_BYTES["fp32"]
    states = chunks * k_width * v_width * DTYPE_BYTES["fp32"]
    forward, backward = chunk_flops(k_width, v_width)
    again = forward - 2.0 * CHUNK * k_width * v_width - 2.0 * CHUNK**2 * v_width
    if kernel == "library":
        forward = again = float(reported_flops(size, max(k_width, v_width), size))
        backward = 2 * forward
    for phase, flops, read, written in (
        (Phase.FORWARD, forward, inputs, out + state),
        (Phase.BACKWARD_INPUT, backward + again, 2 * inputs + out + states + state,
         inputs + states + state),
    ):  # fmt: skip
        cost.op(
            name, OpKind.ATTENTION, phase, dtype=dtype, flops=chunks * flops, m=s, n=size,
            k=k_width, batch=b * h, read_bytes=read, written_bytes=written,
            kernel="kda" if kernel == "triton" else kernel,
        )  # fmt: skip


def kept_bytes(
    tokens: ArrayLike, heads: ArrayLike, k_width: int, v_width: int, dtype: str
) -> Array:
    """Returns the bytes of q, k, v, log-decays and rates that the op saves."""
    t = np.asarray(tokens, float) * np.asarray(heads, float)
    narrow = (2 * k_width + v_width) * DTYPE_BYTES[dtype]
    return np.asarray(t * (narrow + (k_width + 1) * DTYPE_BYTES["fp32"]))
