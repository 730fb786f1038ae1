"""A tournament's field: which plans run for real, and which one the planner would have taken.

Two fields of plans: random ones, from which (with a probe) a calibration is learnt, and the
best of a search with that calibration. The planner's choice is made before the race, and no
plan is judged by a calibration that has seen its own run: a plan of the first field is priced
with what the others taught ("held out").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from pydantic import PositiveFloat

from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.search import price, search
from flopwright.planner.space import legal_candidates
from flopwright.report.metrics import Measurement
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.fit_runs import fit_runs
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.calibration.repredict import predict_measurement
from flopwright.simulator.training.predict import predict
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario

# "" where the plan can run, else why it cannot.
Refusal = Callable[[ParallelPlan], str]
# Why a plan is in the field: the planner's best (calibrated, uncalibrated), or drawn.
Origin = Literal["top", "prior", "random"]
_MORE: Final = 10  # ranked plans looked at beyond those wanted, where some are refused
TWIN_SUFFIX: Final = "-again"


class Contender(Spec):
    """One plan that runs for real.

    Attributes:
        origins: why it is in the field.
        prior_step_s: seconds of a step by the public prior, uncalibrated.
        predicted_step_s: by the calibration that has not seen it; None before one was learnt.
    """

    name: str
    plan: ParallelPlan
    origins: tuple[Origin, ...]
    prior_step_s: PositiveFloat
    predicted_step_s: PositiveFloat | None = None


class Refused(Spec):
    """One plan that was left out: before the race, or because its trial failed."""

    name: str
    reason: str


@dataclass(slots=True)
class Field:
    """Plans by name, as they are found; a plan that is found again gets another origin."""

    scenario: Scenario
    refusal: Refusal
    prior: Calibration
    contenders: list[Contender] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def enter(self, plan: ParallelPlan, origin: Origin) -> bool:
        """Adds a plan that can run; returns whether it is in the field now."""
        for i, known in enumerate(self.contenders):
            if known.plan == plan:
                if origin not in known.origins:
                    origins = (*known.origins, origin)
                    self.contenders[i] = known.model_copy(update={"origins": origins})
                return True
        name = self._name(plan)
        reason = self.refusal(plan)
        if reason:
            if all(r.name != name for r in self.refused):
                self.refused.append(Refused(name=name, reason=reason))
            return False
        entry = Contender(
            name=name,
            plan=plan,
            origins=(origin,),
            prior_step_s=step_seconds(self.scenario, plan, self.prior),
        )
        self.contenders.append(entry)
        return True

    def _name(self, plan: ParallelPlan) -> str:
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", plan.label()).strip("-.")
        taken = {c.name for c in self.contenders}
        name, number = base, 2
        while name in taken:
            name, number = f"{base}-v{number}", number + 1
        return name


def new_field(scenario: Scenario, refusal: Refusal, entered: Iterable[Contender] = ()) -> Field:
    """Returns a field of a scenario's plans, with those that entered before."""
    prior = default_calibration(scenario.cluster.node.gpu)
    return Field(scenario, refusal, prior, contenders=list(entered))


def step_seconds(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> float:
    """Returns the predicted step time of a plan."""
    prediction, _ = predict(scenario, plan, calibration, whole_trace=False)
    return prediction.metrics.step_time_s


def draw_random(entered: Field, count: int, seed: int) -> None:
    """Enters `count` plans drawn from all that are legal and fit, each as likely as any other."""
    candidates = legal_candidates(entered.scenario)
    fits = np.flatnonzero(price(entered.scenario, candidates, entered.prior).fits)
    drawn = 0
    for index in np.random.default_rng(seed).permutation(fits):
        if drawn == count:
            return
        plan = candidates.plan(int(index))
        known = any(c.plan == plan for c in entered.contenders)
        drawn += entered.enter(plan, "random") and not known


def enter_best(
    entered: Field, calibration: Calibration, count: int, origin: Origin = "top"
) -> None:
    """Enters the best `count` plans of a search that can run, a layout's best each."""
    ranked = search(entered.scenario, calibration, count + _MORE).ranked
    own = entered.scenario.workload.precision.gemm
    taken = 0
    for found in ranked:
        if taken == count:
            return
        if found.gemm not in (None, own):
            continue  # another format of products is another workload, with losses of its own
        taken += entered.enter(found.plan, origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What trials taught: a calibration of all, and of all but one plan's runs.

    Attributes:
        without: by plan name, what the runs of the other plans taught.
    """

    calibration: Calibration
    without: Mapping[str, Calibration]

    def held_out(self, name: str) -> Calibration:
        """Returns the calibration that has not seen a plan."""
        return self.without.get(name, self.calibration)


def learn(base: Calibration, measurements: Sequence[Measurement]) -> Learnt:
    """Returns what runs teach on top of curves; of one run alone nothing is held out.

    Args:
        base: curves of a probe, or a public prior.
        measurements: of trials; of the same plan (by name) one or several.
    """

    def fitted(chosen: Sequence[Measurement]) -> Calibration:
        return fit_runs(base, chosen, predict_measurement) if chosen else base

    names = dict.fromkeys(m.plan_name for m in measurements)
    return Learnt(
        calibration=fitted(measurements),
        without={n: fitted([m for m in measurements if m.plan_name != n]) for n in names},
    )


def priced(
    contenders: Sequence[Contender], scenario: Scenario, learnt: Learnt
) -> tuple[Contender, ...]:
    """Returns the contenders with their step times by a calibration that has not seen them."""
    return tuple(
        c.model_copy(
            update={"predicted_step_s": step_seconds(scenario, c.plan, learnt.held_out(c.name))}
        )
        for c in contenders
    )


def choice(contenders: Sequence[Contender]) -> Contender:
    """Returns the planner's choice: the shortest predicted step; it was not seen running."""

    def predicted_s(c: Contender) -> float:
        assert c.predicted_step_s is not None, "priced before it is chosen"
        return c.predicted_step_s

    return min(contenders, key=predicted_s)


def prior_choice(contenders: Sequence[Contender]) -> Contender:
    """Returns what the planner would have taken without any calibration."""
    best = [c for c in contenders if "prior" in c.origins] or list(contenders)
    return min(best, key=lambda c: c.prior_step_s)


def twin_of(name: str) -> str:
    """Returns the second name under which a plan runs again, to show the noise."""
    return f"{name}{TWIN_SUFFIX}"
