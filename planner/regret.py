"""How the planner ranks configurations that others tuned by hand: a test of its judgement.

A vendor's published configuration is among the best of what its framework can do on those
GPUs. So in our model it has to fit, to stand near the top of everything that fits, and to be
close to our best; where it is not, either the vendor left something on the table or our model
is wrong, and every plan that is said to be clearly better is named with its reason.

Published tables give the split, not what was recomputed or how layers were dealt out. Where the
split without recompute does not fit, the run must have recomputed something (it ran): it is then
judged with the fastest policy with which it fits, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.search import price
from flopwright.planner.space import legal_candidates
from flopwright.planner.standing import BetterPlan, lack_text, standing
from flopwright.simulator.accuracy.report_predict import calibration_of
from flopwright.simulator.accuracy.run_of_row import PublishedRun
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.candidates import Candidates
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario, SearchSpace

# "Near the top" and "close to our best", and how many runs have to be near the top.
TOP_SHARE: Final = 0.05
CLOSE: Final = 0.08
WANTED_SHARE: Final = 0.8
# What a published table states of a split, by the planner's names.
_STATED: Final = (
    "tp", "pp", "vpp", "cp", "ep", "etp", "dp_replicate", "micro_batch_size", "zero_stage",
    "schedule",
)  # fmt: skip
Advance = Callable[[int, int], None]


class TunedRun(Spec):
    """One configuration that was tuned by hand, among all plans of its scenario.

    Attributes:
        measured_step_s, predicted_step_s: seconds of one optimizer step.
        assumed: what it must have done that its source does not state, "" if nothing.
        lacks: what memory it lacks in our model, "" where it fits.
        rank: 1 + layouts with a better plan, of `layouts` that fit.
        top_share: share of all plans that fit that may be better.
        behind: how much longer it takes than our best, as a share of that.
        better: a plan of each layout that is more than CLOSE better.
    """

    id: str
    model: str
    gpu: str
    num_gpus: int
    label: str
    measured_step_s: float
    predicted_step_s: float
    assumed: str
    lacks: str
    rank: int
    layouts: int
    plans: int
    top_share: float
    behind: float
    better: tuple[BetterPlan, ...]

    @property
    def fits(self) -> bool:
        """Whether our model says that it runs, as it did."""
        return not self.lacks


class Regret(Spec):
    """The configurations of a file; `skipped` has those that could not be ranked and why."""

    runs: tuple[TunedRun, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def feasible(self) -> int:
        """Runs that fit in our model."""
        return sum(run.fits for run in self.runs)

    @property
    def near_top(self) -> int:
        """Runs that fit and stand among the best TOP_SHARE of all plans."""
        return sum(run.fits and run.top_share <= TOP_SHARE for run in self.runs)

    @property
    def close(self) -> int:
        """Runs that fit and take at most CLOSE longer than our best."""
        return sum(run.fits and run.behind <= CLOSE for run in self.runs)


def tuned_space(run: PublishedRun) -> SearchSpace:
    """Returns what the framework of a Megatron-Core run could have been told to do.

    The GPUs, the batch and the formats are the run's. Schedules are Megatron-Core's; whether
    expert exchange ran beside another micro-batch no table states, so no plan may. The
    optimizer is cut over all data-parallel ranks or as the run has it, and what the run moved
    to the host or kept in FP8 may stay there or not.
    """
    plan = run.plan
    either = (False, True)
    return SearchSpace(
        zero_stage=tuple(sorted({1, plan.zero_stage})),
        schedule=("1f1b", "interleaved_1f1b"),
        dp_replicate=tuple(sorted({1, plan.dp_replicate})),
        context_parallel=(plan.context_parallel,),
        sequence_parallel=(plan.sequence_parallel,),
        fp8_activations=either if plan.fp8_activations else (False,),
        activation_offload=either if plan.activation_offload else (False,),
        optimizer_offload=either if plan.optimizer_offload else (False,),
        gradient_offload=(plan.gradient_offload,),
        parameter_offload=(plan.parameter_offload,),
    )


def judge(run: PublishedRun) -> TunedRun:
    """Returns where a run's configuration stands among all plans of its scenario.

    Raises:
        InputError: its plan breaks a rule of shape, or its space holds no legal plan.
    """
    assert run.measured_step_s is not None
    scenario = run.scenario.model_copy(update={"search": tuned_space(run), "objective": "time"})
    calibration = calibration_of(run)
    priced = price(scenario, legal_candidates(scenario), calibration)
    plan = settled_plan(run.plan, scenario, calibration)
    found = standing(scenario, plan, calibration, name=run.id, priced=priced, refine=False)
    return TunedRun(
        id=run.id,
        model=run.model_name,
        gpu=run.gpu,
        num_gpus=run.num_gpus,
        label=plan.label(),
        measured_step_s=run.measured_step_s,
        predicted_step_s=found.prediction.metrics.step_time_s,
        assumed="" if plan == run.plan else f"{_policy(plan)}, which its source does not state",
        lacks=lack_text(found),
        rank=found.rank,
        layouts=found.layouts,
        plans=found.plans,
        top_share=found.top_share,
        behind=found.behind,
        better=tuple(b for b in found.better if 1 / (1 - b.gain) - 1 > CLOSE),
    )


def settled_plan(plan: ParallelPlan, scenario: Scenario, calibration: Calibration) -> ParallelPlan:
    """Returns a plan as it must have run: itself where it fits, else its fastest that does.

    Only recompute and the dealing out of layers change. A plan that fits in no way is returned
    as it is.
    """
    alone = price(scenario, Candidates.from_plans((plan,)), calibration)
    if bool(alone.fits[0]):
        return plan
    stated = {name: getattr(plan, name) for name in _STATED}
    try:
        same = price(scenario, legal_candidates(scenario, stated), calibration)
    except InputError:  # the space leaves out what it holds to be foolish
        return plan
    fitting = np.flatnonzero(same.fits)
    if not len(fitting):
        return plan
    return same.candidates.plan(int(fitting[np.argmin(same.step_time_s[fitting])]))


def _policy(plan: ParallelPlan) -> str:
    """Returns in words what a plan recomputes."""
    if plan.recompute == "none":
        return "layers dealt out otherwise"
    tags = f" of {', '.join(plan.recompute_tags)}" if plan.recompute_tags else ""
    depth = "" if plan.recompute_layers is None else f" in {plan.recompute_layers} layers a chunk"
    return f"{plan.recompute} recompute{tags}{depth}"


def tuned_runs(runs: Iterable[PublishedRun], framework: str) -> tuple[PublishedRun, ...]:
    """Returns the runs of a framework that state their whole split and were timed."""
    return tuple(
        run
        for run in runs
        if run.stack.framework == framework
        and run.measured_step_s is not None
        and not run.flags & {"own-plan", "odd"}
    )


def regret(runs: Sequence[PublishedRun], advance: Advance | None = None) -> Regret:
    """Returns every run judged; one that cannot be is skipped with its reason."""
    judged, skipped = [], []
    for done, run in enumerate(runs):
        try:
            judged.append(judge(run))
        except InputError as error:
            skipped.append((run.id, " ".join(str(error).split())))
        if advance is not None:
            advance(done + 1, len(runs))
    return Regret(runs=tuple(judged), skipped=tuple(skipped))
