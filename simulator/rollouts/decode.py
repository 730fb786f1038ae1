"""Time of many decode steps at once: an instance jumps from completion to completion.

While the set of active attempts does not change, a step costs a + c * b + kappa * context
and every step adds b to the context. So n steps are a closed form, and no loop ever runs
over tokens.
"""

from __future__ import annotations

import math

from flopwright.spec.rollout import DecodeStep


def steps_time_s(decode: DecodeStep, active: int, context: int, steps: int) -> float:
    """Returns the seconds of `steps` decode steps.

    Args:
        active: attempts that decode, b; each gets one token a step.
        context: tokens of context over all of them before the first step, C.
        steps: n. The sum over steps j = 0..n-1 of a + c*b + kappa*(C + j*b) is
            n*(a + c*b + kappa*C) + kappa*b*n*(n-1)/2.
    """
    each = decode.a_s + decode.c_s * active + decode.kappa_s * context
    return steps * each + decode.kappa_s * active * (steps * (steps - 1) / 2)


def whole_steps(
    decode: DecodeStep, active: int, context: int, elapsed_s: float, at_most: int
) -> int:
    """Returns how many whole steps fit into `elapsed_s`, at most `at_most`.

    The positive root of the quadratic above, then corrected for rounding.
    """
    if elapsed_s >= steps_time_s(decode, active, context, at_most):
        return at_most
    square = decode.kappa_s * active / 2
    linear = decode.a_s + decode.c_s * active + decode.kappa_s * context - square
    root = math.sqrt(max(0.0, linear**2 + 4 * square * elapsed_s))
    # 2c / (b + sqrt) is the stable form of the root; it also covers square = 0.
    guess = 2 * elapsed_s / (linear + root) if linear + root > 0 else 0.0
    steps = min(at_most - 1, max(0, math.floor(guess)))
    while steps > 0 and steps_time_s(decode, active, context, steps) > elapsed_s:
        steps -= 1
    while steps + 1 < at_most and steps_time_s(decode, active, context, steps + 1) <= elapsed_s:
        steps += 1
    return steps
