"""The order of priced candidates: who fits, who is best, deterministic where equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.errors import InputError, Violation
from flopwright.planner.result import RankedPlan
from flopwright.simulator.training.candidates import Candidates, axis_names, distinct
from flopwright.spec.scenario import Scenario

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

# What makes a layout; the rest (virtual stages, recompute, storage, offload, layer split)
# are its variants.
LAYOUT_AXES: Final = (
    "tp",
    "pp",
    "cp",
    "ep",
    "etp",
    "dp_replicate",
    "dp_shard",
    "micro_batch_size",
    "zero_stage",
)
# Times closer than this (relative) count as equal: then memory, then simplicity decide.
TIE: Final = 1e-9
# Candidates that are sorted at first: more than most searches look at.
_FIRST_PART: Final = 2048
_SWITCHES: Final = (
    "activation_offload",
    "optimizer_offload",
    "gradient_offload",
    "parameter_offload",
    "fused_loss",
    "fp8_activations",
    "recompute",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Candidates with what the simulator says of them.

    Attributes:
        step_time_s: by candidate; peak_bytes of the fullest GPU, on stage `peak_stage`.
        fits: whether GPU memory and host memory hold it, without any headroom.
    """

    candidates: Candidates
    step_time_s: Floats
    peak_bytes: Floats
    peak_stage: Ints
    fits: Bools


def select(priced: Priced, index: Ints, step_time_s: Floats | None = None) -> Priced:
    """Returns the candidates at `index`, with other step times where given."""
    return Priced(
        candidates=priced.candidates.take(index),
        step_time_s=priced.step_time_s[index] if step_time_s is None else step_time_s,
        peak_bytes=priced.peak_bytes[index],
        peak_stage=priced.peak_stage[index],
        fits=priced.fits[index],
    )


def objective_value(priced: Priced, scenario: Scenario) -> Floats:
    """Returns what is minimised, (C,): see Scenario.objective.

    Where steps only break ties (headroom, gpus), they are the fraction of a whole number.
    """
    step, world = priced.step_time_s, priced.candidates.world_size
    if scenario.objective == "cost":
        return np.asarray(step * world)
    if scenario.objective == "energy":
        return np.asarray(step * world * watts(scenario))
    if scenario.objective == "headroom":
        return np.asarray(priced.peak_bytes + step / (1.0 + step))
    if scenario.objective == "gpus":
        return np.asarray(world + step / (1.0 + step))
    return step


def plan_value(scenario: Scenario, plan: RankedPlan) -> float:
    """Returns `objective_value` of one ranked plan, refined where it was."""
    metrics = plan.prediction.metrics
    peak = metrics.peak_memory_bytes
    one = Priced(
        candidates=Candidates.from_plans((plan.plan,)),
        step_time_s=np.array([plan.best_step_time_s]),
        peak_bytes=np.array([float(peak)]),
        peak_stage=np.zeros(1, np.int64),
        fits=np.ones(1, bool),
    )
    return float(objective_value(one, scenario)[0])


def watts(scenario: Scenario) -> float:
    """Returns the power of one GPU at the meter: its rated power with its share of cooling.

    Raises:
        InputError: the processor's power is not known.
    """
    cluster = scenario.cluster
    power = cluster.node.gpu.power_watts
    if power is None:
        raise InputError(
            Violation(
                field="objective",
                value="energy",
                rule=f"the power of {cluster.node.gpu.name} is not known",
                nearest_fix="give cluster.node.gpu.power, or use objective cost",
            )
        )
    return power * cluster.power_usage_effectiveness


def headroom(priced: Priced, scenario: Scenario) -> Floats:
    """Returns the share of GPU memory that each candidate leaves free (negative: it lacks)."""
    return np.asarray(1.0 - priced.peak_bytes / scenario.cluster.node.gpu.hbm_bytes)


def comfortable(priced: Priced, scenario: Scenario) -> Bools:
    """Returns True where a candidate fits and leaves the headroom the scenario asks for."""
    return np.asarray(
        priced.fits & (headroom(priced, scenario) >= scenario.search.memory_headroom)
    )


def order(priced: Priced, scenario: Scenario) -> Ints:
    """Returns candidate indices, best first.

    First those with the asked headroom, then those that fit, then the rest; within each by
    objective, then by how few memory switches are on, then by peak memory, then by the
    axes themselves, so that equal inputs always give the same order.
    """
    value = objective_value(priced, scenario)
    rounded = np.round(np.log(value) / TIE)
    c = priced.candidates
    tier = np.where(comfortable(priced, scenario), 0, np.where(priced.fits, 1, 2))
    switches = sum(getattr(c, n) for n in _SWITCHES)
    keys = (tier, rounded, switches, priced.peak_bytes, *(getattr(c, n) for n in axis_names()))
    return np.lexsort(keys[::-1])


def best_first(priced: Priced, scenario: Scenario, index: Ints) -> Iterator[Ints]:
    """Yields the candidates at `index` in the order of `order`, a part at a time.

    A search rarely looks far: sorting all of hundreds of thousands would take longer.
    """
    left, value = index, objective_value(priced, scenario)[index]
    size = _FIRST_PART
    while len(left):
        here = np.ones(len(left), bool)
        if len(left) > size:
            here = value <= np.partition(value, size)[size] * (1 + 10 * TIE)
        part = left[here]
        yield part[order(select(priced, part), scenario)]
        left, value, size = left[~here], value[~here], 4 * size


def layout_ids(candidates: Candidates) -> Ints:
    """Returns an id for each candidate that is equal exactly within a layout."""
    return distinct(*(getattr(candidates, n) for n in LAYOUT_AXES))[1]


def best_of_each_layout(ordered: Ints, ids: Ints) -> Ints:
    """Returns the entries of `ordered` that are the first of their layout, in order."""
    _, first = np.unique(ids[ordered], return_index=True)
    return ordered[np.sort(first)]
