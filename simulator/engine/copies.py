"""Copies of activations to the host and back as what they are: work of the copy engines.

The bound of a search has them inside the actions that they run beside, as far as those do
not cover them. A simulated step has the list's OFFLOAD and FETCH take their time on engines
of their own, one each way, and the backward wait for what it fetches.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.durations import Durations
from flopwright.simulator.training.optimizer import host_link
from flopwright.simulator.training.predict import durations_of
from flopwright.simulator.training.stages import PipelineCosts
from flopwright.simulator.training.transfers import offloaded_bytes
from flopwright.spec.scenario import Scenario


def copied_apart(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration, costs: PipelineCosts
) -> tuple[PipelineCosts, Durations]:
    """Returns one plan's costs without the copies that its list has, and all its durations.

    Shards of weights and gradients on the host stay inside the actions: the list does not
    move them.
    """
    on_host = plan.parameter_offload or plan.gradient_offload
    if not plan.activation_offload or on_host:
        return costs, durations_of(costs)
    micro = costs.micro
    forward = {k: v for k, v in micro.forward.items() if k != "offload"}
    backward = {k: v for k, v in micro.backward.items() if k != "offload"}
    without = replace(
        micro,
        forward=forward,
        backward=backward,
        forward_s=np.asarray(sum(forward.values())),
        backward_s=np.asarray(sum(backward.values())),
    )
    apart = replace(costs, micro=without)
    link = host_link(scenario)
    moved = offloaded_bytes(costs.candidates, costs.saved_bytes, costs.saved_fp8_bytes)[:, 0]
    factor = calibration.factors.get("offload", 1.0)
    copy_s = np.where(moved > 0, moved / link.bytes_per_s + link.latency_s, 0.0) * factor
    return apart, replace(durations_of(apart), offload_s=copy_s, fetch_s=copy_s)
