"""The process that does the dashboard's long work: one request in, lines of JSON out.

    python -m flopwright.dashboards.worker

It reads one line, `{"task": NAME, "asked": {...}}`, and writes `{"done": N, "total": N,
"note": TEXT}` now and then, and at last `{"answer": ...}` or `{"problems": [...]}`. It ends
when its standard input is closed: with the server, or when the server wants the work no more.
The work yields to everything else on the machine, so the page stays quick meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, Final

from flopwright.errors import InputError, Violation

Tell = Callable[[int, int, str], None]
Asked = dict[str, Any]
LISTED: Final = 10
_NICE: Final = 15


def search_plans(asked: Asked, tell: Tell) -> Any:
    """Returns the best plans of a scenario, as `flopwright plan` finds them."""
    from flopwright.planner.search import search
    from flopwright.simulator.accuracy.named_stacks import scenario_calibration
    from flopwright.spec.scenario import Scenario

    def advance(done: int, total: int) -> None:
        now = "; the best are replayed" if done == total else ""
        tell(done, total, f"{done:,} of {total:,} plans priced{now}")

    scenario = Scenario.model_validate(asked["scenario"])
    found = search(scenario, scenario_calibration, LISTED, progress=advance, refine=True)
    return found.to_data()


def plan_sizes(asked: Asked, tell: Tell) -> Any:
    """Returns the rows of a sweep, as `flopwright sweep` plans them."""
    from flopwright.planner.sweep import plan_point
    from flopwright.spec.scenario import Scenario
    from flopwright.spec.sweep import sweep_points

    points = sweep_points(Scenario.model_validate(asked["scenario"]))
    rows = []
    for index, point in enumerate(points):
        tell(index, len(points), f"planning {point.scenario.cluster.num_gpus:,} GPUs")
        rows.append(plan_point(point).to_data())
    return rows


def explain_plan(asked: Asked, tell: Tell) -> Any:
    """Returns why a plan is as it is, as `flopwright explain` does."""
    from flopwright.plan.parallel import ParallelPlan
    from flopwright.planner.questions.explained import explain
    from flopwright.simulator.accuracy.named_stacks import scenario_calibration
    from flopwright.spec.scenario import Scenario

    tell(0, 0, "pricing every plan one choice away")
    scenario = Scenario.model_validate(asked["scenario"])
    plan = ParallelPlan.model_validate(asked["plan"])
    return explain(scenario, plan, scenario_calibration(scenario)).to_data()


def simulate_rounds(asked: Asked, tell: Tell) -> Any:
    """Returns the steady rounds of a scenario, as `flopwright rollouts` does."""
    from flopwright.simulator.rollouts.rounds import simulate
    from flopwright.spec.rollout import RolloutScenario

    scenario = RolloutScenario.model_validate(asked["scenario"])
    return simulate(scenario, progress=lambda d, n: tell(d, n, f"{d} of {n} rounds")).to_data()


def sweep_fractions(asked: Asked, tell: Tell) -> Any:
    """Returns the sweep over lambda, as `flopwright rollouts --sweep` makes it."""
    from flopwright.simulator.rollouts.sweep import sweep_lambda
    from flopwright.spec.rollout import RolloutScenario

    scenario = RolloutScenario.model_validate(asked["scenario"])
    found = sweep_lambda(scenario, progress=lambda d, n: tell(d, n, f"{d} of {n} lambdas"))
    return found.to_data()


def plan_loop(asked: Asked, tell: Tell) -> Any:
    """Returns the best loops, as `flopwright rollouts --search` finds them."""
    from flopwright.planner.rollouts.search import search_loop
    from flopwright.spec.loop import LoopScenario

    loop = LoopScenario.model_validate(asked["scenario"])
    options = {name: asked[name] for name in ("rounds", "zoom") if name in asked}
    found = search_loop(
        loop,
        time_limit_s=asked["time_limit_s"],
        progress=lambda d, n: tell(d, n, f"{d:,} of {n:,} loops settled"),
        **options,
    )
    return found.to_data()


def plan_smaller(asked: Asked, tell: Tell) -> Any:
    """Returns plans for fewer nodes, as `flopwright export --fallbacks` finds them."""
    from flopwright.plan.file import PlanFile
    from flopwright.planner.fallback import fallbacks
    from flopwright.simulator.accuracy.named_stacks import scenario_calibration
    from flopwright.spec.scenario import Scenario

    tell(0, 0, "planning for fewer nodes")
    plan = PlanFile.model_validate(asked["plan"])
    calibration = scenario_calibration(Scenario.model_validate(asked["scenario"]))
    found = fallbacks(plan, asked["step_time_s"], calibration, asked["count"])
    return [one.to_data() for one in found]


TASKS: Final[dict[str, Callable[[Asked, Tell], Any]]] = {
    "search": search_plans,
    "scaling": plan_sizes,
    "explain": explain_plan,
    "fallbacks": plan_smaller,
    "rounds": simulate_rounds,
    "lambda": sweep_fractions,
    "loop": plan_loop,
}


def worked(line: str, tell: Tell) -> dict[str, Any]:
    """Returns the last line's data for a request: an answer, or what is wrong with it."""
    request = json.loads(line)
    try:
        return {"answer": TASKS[request["task"]](request["asked"], tell)}
    except InputError as error:
        return {"problems": [v.as_dict() for v in error.violations]}
    except MemoryError:
        rule = "this work needs more memory than the machine has"
        return {"problems": [Violation(rule=rule).as_dict()]}


def main() -> int:
    """Serves one request of standard input; returns 0."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's, which then closes our input
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICE)
    out: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever else is printed must not stand between the lines
    _get_ready()
    line = sys.stdin.readline()
    if not line:
        return 0
    threading.Thread(target=_end_with_input, daemon=True).start()

    def say(data: dict[str, Any]) -> None:
        out.write(json.dumps(data, separators=(",", ":")).encode() + b"\n")

    say(worked(line, lambda done, total, note: say({"done": done, "total": total, "note": note})))
    return 0


def _get_ready() -> None:
    """Imports what most requests need, before there is one."""
    import flopwright.planner.search
    import flopwright.simulator.accuracy.named_stacks  # noqa: F401


def _end_with_input() -> None:
    """Ends the process when the server closes its end or is gone."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
