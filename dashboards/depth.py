"""One plan in depth: what the Plan page shows, computed once for each plan and scenario."""

from __future__ import annotations

from dataclasses import dataclass

from flopwright.dashboards.results import results
from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.plan_text import plan_words
from flopwright.planner.predicted import predicted_step
from flopwright.planner.questions.explained import Explanation, explain
from flopwright.report.metrics import Prediction
from flopwright.report.trace import chrome_trace, trace_bytes
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.simulator.engine.simulate import SimulatedStep, simulate
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import make_plan_file
from flopwright.spec.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Depth:
    """A plan with its prediction, its simulated step and what it sends.

    Attributes:
        comm_bytes: what a rank of the busiest stage sends in a step, by group of ranks.
    """

    plan: ParallelPlan
    prediction: Prediction
    step: SimulatedStep
    comm_bytes: dict[str, float]


def depth(scenario: Scenario, plan: ParallelPlan) -> Depth:
    """Returns the plan in depth.

    Raises:
        InputError: every rule that the plan breaks.
    """
    kind = f"depth {plan_words(plan)}"
    kept = results().get(kind, scenario)
    if kept is None:
        calibration = scenario_calibration(scenario)
        one = evaluate(scenario, Candidates.from_plans((plan,)), calibration)
        kept = Depth(
            plan=plan,
            prediction=predicted(scenario, plan),
            step=simulate(scenario, plan, calibration, engine="replay"),
            comm_bytes={g: float(v[0]) for g, v in one.comm_bytes.items() if v[0] > 0},
        )
        results().put(kind, scenario, kept)
    assert isinstance(kept, Depth)
    return kept


def predicted(scenario: Scenario, plan: ParallelPlan) -> Prediction:
    """Returns the plan's prediction.

    Raises:
        InputError: every rule that the plan breaks.
    """
    kind = f"predicted {plan_words(plan)}"
    kept = results().get(kind, scenario)
    if kept is None:
        calibration = scenario_calibration(scenario)
        kept, _ = predict(scenario, plan, calibration, plan.label(), whole_trace=False)
        results().put(kind, scenario, kept)
    assert isinstance(kept, Prediction)
    return kept


def explained(scenario: Scenario, plan: ParallelPlan) -> Explanation:
    """Returns why the plan is as it is, as `flopwright explain` does."""
    kind = f"explained {plan_words(plan)}"
    kept = results().get(kind, scenario)
    if kept is None:
        kept = explain(scenario, plan, scenario_calibration(scenario))
        results().put(kind, scenario, kept)
    assert isinstance(kept, Explanation)
    return kept


def plan_file(scenario: Scenario, plan: ParallelPlan) -> PlanFile:
    """Returns the plan as a file, with the summary of its prediction."""
    step = predicted_step(predicted(scenario, plan))
    return make_plan_file(scenario, plan, plan.label(), step)


def perfetto(found: Depth) -> bytes:
    """Returns the simulated step as a gzipped Chrome trace, which Perfetto opens."""
    data = chrome_trace(found.step.trace, world_size=found.plan.world_size)
    return trace_bytes(data, zipped=True)
