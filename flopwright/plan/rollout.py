"""The round policy at its edges: how many completions end a round, what goes to training.

Pure functions over flat arrays. The decisions inside a round are in `rollout_choices`; the
simulator and a real engine call the same ones, so that a real round's decisions can be
replayed. Nothing here knows how long an attempt will become.

The policy: attempts that were parked resume first, oldest first; then new attempts start
in prompt order. A round ends when ceil(lambda * attempts in flight) have completed. Whether
attempts that finish in that very step count too is the tie policy. A prompt is dispatched
to training when all its samples are complete.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def stop_count(num_attempts: int, stop_fraction: float) -> int:
    """Returns how many completions end a round: ceil(lambda * M), at least one.

    A product that is whole up to rounding counts as whole: 0.7 * 10 is 7, not 8.
    """
    return min(num_attempts, max(1, math.ceil(stop_fraction * num_attempts - 1e-9)))


def dispatch(prompts: Rows, samples_per_prompt: int) -> Rows:
    """Returns the prompts all of whose samples are among the complete, undispatched ones.

    Args:
        prompts: the prompt of every complete attempt that has not been trained on.
        samples_per_prompt: K; the prompt goes to training with all K or waits.
    """
    unique, counts = np.unique(prompts, return_counts=True)
    complete: Rows = unique[counts == samples_per_prompt]
    return complete


def too_old(first: Rows, version: int, limit: int) -> Flags:
    """Returns which attempts, trained on at `version`, would have tokens older than the limit.

    Args:
        first: version of each one's first token; below 0: it has none yet.
    """
    return (first >= 0) & (version - first > limit)


def masked_tokens(versions: Rows, tokens: Rows, version: int, limit: int) -> int:
    """Returns how many of the tokens, by the version that generated them, are too old to count."""
    return int(tokens[version - versions > limit].sum())


def lent(contexts: Rows, count: int) -> Rows:
    """Returns which running attempts move to engines that are lent: the shortest contexts.

    They are prefilled again there, which costs least where there is least to read.

    Args:
        contexts: tokens of each running attempt, by age.
        count: how many move; the older first where contexts are equal.
    """
    order: Rows = np.argsort(contexts, kind="stable")
    return order[: max(0, count)]
