"""Ranks that differ: jitter of every action, stragglers, slow links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.ops import Array
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.engine.cluster_links import replicas_in_exchange
from flopwright.simulator.training.durations import Disturbance
from flopwright.simulator.training.program import Op, Program

_MAX_JITTER = 2.0
_MAX_FACTOR = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbation:
    """What differs between ranks.

    Attributes:
        jitter: standard deviation of the logarithm of each action's seconds; the mean stays.
        stragglers: factor on the seconds of what a GPU computes, by its rank.
        slow_links: factor on the seconds of what a GPU sends, by its rank.
        seed: of the jitter.
    """

    jitter: float = 0.0
    stragglers: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        broken = []
        if not 0 <= self.jitter <= _MAX_JITTER:
            rule = "a standard deviation of a logarithm"
            limit = f"0 to {_MAX_JITTER:g}"
            broken.append(
                Violation(field="jitter", value=f"{self.jitter:g}", rule=rule, limit=limit)
            )
        for name, factors in (("straggler", self.stragglers), ("slow_link", self.slow_links)):
            broken += [
                Violation(
                    field=name,
                    value=f"{rank}={factor:g}",
                    rule="a factor on seconds must be above 0",
                    limit=f"{_MAX_FACTOR:g}",
                )
                for rank, factor in factors.items()
                if not (math.isfinite(factor) and 0 < factor <= _MAX_FACTOR)
            ]
        if broken:
            raise InputError(broken)

    @property
    def is_none(self) -> bool:
        """Whether all ranks are alike."""
        return not (self.jitter or self.stragglers or self.slow_links)


def disturbance_of(
    perturbation: Perturbation, plan: ParallelPlan, program: Program, samples: int = 1
) -> Disturbance:
    """Returns the factors of every entry.

    A rank of the engine is a tensor- and context-parallel group; its slowest GPU counts.

    Raises:
        InputError: a rank that the plan does not have.
    """
    _check_ranks(perturbation, plan)
    gpus = plan.cp * plan.tp
    shape = (samples, plan.dp)
    slow = _by_rank(perturbation.stragglers, plan)
    rng = np.random.default_rng(perturbation.seed)
    factors = []
    for stage in range(program.num_stages):
        ops = np.array([c.op for c in program.codes if c.stage == stage])
        works = np.isin(ops, (Op.COMPUTE, Op.FIRST, Op.SECOND, Op.STEP))
        values = np.ones((len(ops), *shape))
        values[works] = slow[stage]
        if perturbation.jitter:
            drawn = rng.standard_normal((int(works.sum()), *shape))
            for _ in range(gpus - 1):
                np.maximum(drawn, rng.standard_normal(drawn.shape), out=drawn)
            values[works] *= np.exp(perturbation.jitter * drawn - perturbation.jitter**2 / 2)
        factors.append(values)
    return Disturbance(
        factors=tuple(factors),
        links=_by_rank(perturbation.slow_links, plan),
        group=replicas_in_exchange(plan),
    )


def _by_rank(factors: Mapping[int, float], plan: ParallelPlan) -> Array:
    """Returns the largest factor in each rank of the engine, (stages, replicas)."""
    out = np.ones((plan.pp, plan.dp, plan.cp * plan.tp))
    flat = out.reshape(-1)  # ranks stand in this order (plan/mesh.py)
    for rank, factor in factors.items():
        flat[rank] = factor
    return np.asarray(out.max(axis=2))


def _check_ranks(perturbation: Perturbation, plan: ParallelPlan) -> None:
    broken = [
        Violation(
            field=name,
            value=str(rank),
            rule="the plan has no such rank",
            limit=f"0 to {plan.world_size - 1}",
        )
        for name, factors in (
            ("straggler", perturbation.stragglers),
            ("slow_link", perturbation.slow_links),
        )
        for rank in factors
        if not 0 <= rank < plan.world_size
    ]
    if broken:
        raise InputError(broken)
