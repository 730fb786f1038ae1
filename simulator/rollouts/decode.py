"""Time of many engine steps at once: an instance jumps from event to event.

While the set of active attempts does not change, a step costs base + per_context * context
and every step adds one token of context an attempt. So n steps are a closed form, and no
loop ever runs over tokens. A prefill that rides along adds its own closed form. Numbers in,
numbers out: the compiled loop takes these functions as they stand.
"""

from __future__ import annotations

import math

from flopwright.spec.rollout import DecodeStep


def decode_s(base_s: float, per_context_s: float, active: int, context: int, steps: int) -> float:
    """Returns the seconds of `steps` decode steps.

    Args:
        base_s, per_context_s: of one step of so many active attempts.
        active: attempts that decode, b; each gets one token a step.
        context: tokens of context over all of them before the first step, C.
        steps: n. The sum over steps j = 0..n-1 of base + kappa*(C + j*b) is
            n*(base + kappa*C) + kappa*b*n*(n-1)/2.
    """
    n = float(steps)
    return n * (base_s + per_context_s * context) + per_context_s * active * (n * (n - 1.0) / 2.0)


def prefill_s(token_s: float, pair_s: float, new: int, behind: int) -> float:
    """Returns the seconds of reading `new` tokens behind `behind` cached ones, no fixed part."""
    n = float(new)
    return token_s * n + pair_s * (n * behind + n * n / 2.0)


def ride_s(
    fixed_s: float, token_s: float, pair_s: float, ride: int, left: int, at: int, steps: int
) -> float:
    """Returns what one prefill adds to `steps` steps, `ride` tokens of it in each.

    Args:
        left: tokens still to read; the last step may have fewer than `ride` of them.
        at: tokens of the same attempt that are in front of them.
    """
    return steps * fixed_s + prefill_s(token_s, pair_s, min(left, steps * ride), at)


def stretch_s(
    base_s: float,
    per_context_s: float,
    active: int,
    context: int,
    fixed_s: float,
    token_s: float,
    pair_s: float,
    ride: int,
    left: int,
    at: int,
    batch_s: float,
    steps: int,
) -> float:
    """Returns the seconds of `steps` steps with what rides along.

    Args:
        ride, left, at: of the one prefill that takes several steps; left = 0: there is none.
        batch_s: seconds of several prefills that fit into one step together (then steps <= 1).
    """
    seconds = decode_s(base_s, per_context_s, active, context, steps)
    if left > 0:
        seconds += ride_s(fixed_s, token_s, pair_s, ride, left, at, steps)
    elif steps > 0:
        seconds += batch_s
    return seconds


def steps_within(
    base_s: float,
    per_context_s: float,
    active: int,
    context: int,
    fixed_s: float,
    token_s: float,
    pair_s: float,
    ride: int,
    left: int,
    at: int,
    batch_s: float,
    start_s: float,
    until_s: float,
    at_most: int,
) -> int:
    """Returns the most whole steps, of `at_most`, that end no later than `until_s`.

    The positive root of the quadratic in n is tried first, then its neighbours, then halves.
    """
    if start_s > until_s or at_most <= 0:
        return 0
    whole_s = start_s + stretch_s(
        base_s, per_context_s, active, context, fixed_s, token_s, pair_s, ride, left, at,
        batch_s, at_most,
    )  # fmt: skip
    if whole_s <= until_s:
        return at_most
    square = per_context_s * active / 2.0
    linear = base_s + per_context_s * context - square
    if left > 0:
        square += pair_s * ride * ride / 2.0
        linear += fixed_s + token_s * ride + pair_s * ride * at
    left_s = until_s - start_s
    root = math.sqrt(max(0.0, linear * linear + 4.0 * square * left_s))
    # 2c / (b + sqrt) is the stable form of the root; it also covers square = 0.
    guess = 2.0 * left_s / (linear + root) if linear + root > 0.0 else 0.0
    low, high = 0, at_most  # `low` steps fit, `high` do not
    trial, tried = int(min(guess, float(at_most))), 0
    while high - low > 1:
        if tried >= 3 or trial <= low or trial >= high:
            trial = low + (high - low) // 2
        end_s = start_s + stretch_s(
            base_s, per_context_s, active, context, fixed_s, token_s, pair_s, ride, left, at,
            batch_s, trial,
        )  # fmt: skip
        if end_s <= until_s:
            low = trial
            trial += 1
        else:
            high = trial
            trial -= 1
        tried += 1
    return low


def steps_time_s(decode: DecodeStep, active: int, context: int, steps: int) -> float:
    """Returns the seconds of `steps` steps of the linear law a + c * active + kappa * context."""
    base_s = decode.a_s + decode.c_s * active
    return decode_s(base_s, decode.kappa_s, active, context, steps)


def whole_steps(
    decode: DecodeStep, active: int, context: int, elapsed_s: float, at_most: int
) -> int:
    """Returns how many whole steps of the linear law fit into `elapsed_s`, at most `at_most`."""
    base_s = decode.a_s + decode.c_s * active
    return steps_within(
        base_s, decode.kappa_s, active, context, 0.0, 0.0, 0.0, 0, 0, 0, 0.0, 0.0, elapsed_s,
        at_most,
    )  # fmt: skip
