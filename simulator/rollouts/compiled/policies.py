"""Decisions of plan/rollout_choices.py and step times of decode.py, compiled as they are."""

from __future__ import annotations

from numba.extending import register_jitable

from flopwright.plan import rollout_choices as policy
from flopwright.simulator.rollouts import decode
from flopwright.simulator.rollouts.compiled.jit import native

queue_key = native(policy.queue_key)
round_over = native(policy.round_over)
counts_now = native(policy.counts_now)
fits = native(policy.fits)
throttle_admits = native(policy.throttle_admits)
limit_after_preemption = native(policy.limit_after_preemption)
limit_after_completion = native(policy.limit_after_completion)
least_loaded = native(policy.least_loaded)
pulls = native(policy.pulls)
cache_goes = native(policy.cache_goes)

for _part in (decode.decode_s, decode.prefill_s, decode.ride_s, decode.stretch_s):
    register_jitable(_part)
prefill_s = native(decode.prefill_s)
stretch_s = native(decode.stretch_s)
steps_within = native(decode.steps_within)
