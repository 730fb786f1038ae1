"""The fewest GPUs that meet a deadline or a budget: whole nodes, planned anew at each size."""

from __future__ import annotations

from flopwright.planner.recommend_answer import (
    Means,
    Planned,
    Recommendation,
    assumptions_of,
    bound_by,
)
from flopwright.planner.recommend_hunt import KEPT, Hunt
from flopwright.planner.recommend_sizes import (
    DAY_S,
    Goal,
    days_of,
    growing,
    least_nodes,
    show_usd,
    sizes_of,
    usd_of,
)
from flopwright.spec.scenario import Scenario
from flopwright.units import plural, show_seconds


def fewest_gpus(scenario: Scenario, goal: Goal, means: Means) -> Recommendation:
    """Returns the smallest cluster of the scenario's nodes whose best plan meets the goal.

    The sizes are bisected, the search planned anew at each: of those that keep more GPUs busy
    than any smaller one, more nodes are taken to hold more and to be no slower; then the best
    of those left out below the answer are tried. With `every_size` nothing is taken for
    granted. A budget that the smallest cluster in time breaks is looked for in larger ones
    while they get cheaper.

    Raises:
        InputError: a budget without a price, or a limit below one node.
    """
    every = sizes_of(scenario, goal)
    hunt = Hunt(scenario=scenario, goal=goal, means=means, every=every, sizes=growing(every))
    if not goal.every_size and least_nodes(scenario, goal) <= max(every):
        hunt.keep()
    nodes = hunt.settled(hunt.smallest())
    nodes = hunt.all_below(nodes) if goal.every_size else hunt.left_out_below(nodes)
    if nodes is not None and hunt.state(nodes) == "dear":
        nodes = hunt.cheaper_above(nodes)
    if nodes is not None:
        hunt.plan_whole(nodes)
    return _found(hunt, nodes) if nodes is not None else _nothing(hunt)


def _goal_text(goal: Goal) -> str:
    parts = []
    if goal.deadline_s is not None:
        parts.append(f"in {show_seconds(goal.deadline_s)}")
    if goal.budget_usd is not None:
        parts.append(f"for {show_usd(goal.budget_usd)}")
    return " and ".join(parts)


def _judged(hunt: Hunt) -> tuple[str, ...]:
    end = "the high end" if hunt.goal.sure else "the middle"
    cluster = hunt.scenario.cluster
    texts = [f"the goal is judged by {end} of the 80 % interval"]
    if not hunt.goal.every_size:
        texts.append(
            "sizes whose stages are so uneven that a smaller cluster keeps as many GPUs busy "
            "were left out, but for a few below the answer; of the others, more nodes hold more "
            "and are no slower (--every-size plans them all)"
        )
        texts.append(
            f"on the way, sizes were planned with {', '.join(KEPT)} of the own size's best plan; "
            "the answer and the next smaller size with every axis free"
        )
    texts.append(f"clusters of up to {plural(max(hunt.every) * cluster.node.gpus, 'GPU')}")
    if cluster.network is None:
        texts.append("the cluster names no network between nodes, so that it cannot grow")
    return tuple(texts)


def _found(hunt: Hunt, nodes: int) -> Recommendation:
    found = hunt.plan(nodes)
    gpus = nodes * hunt.scenario.cluster.node.gpus
    assert found.run is not None
    interval = found.run.days_interval
    low, high = (show_seconds(d * DAY_S) for d in (interval.low, interval.high))
    return Recommendation(
        question="fewest_gpus",
        found=True,
        answer=f"{plural(gpus, 'GPU')} {_goal_text(hunt.goal)}: {hunt.why(found)}"
        f" (80 % interval {low} to {high})",
        value=gpus,
        attempts=hunt.attempts(),
        scenario=found.scenario,
        plan=found.best,
        run=found.run,
        binding=bound_by(found, hunt.means),
        assumptions=(*_judged(hunt), *assumptions_of(found)),
    )


def _nothing(hunt: Hunt) -> Recommendation:
    planned_rows = [(n, p) for n, p in hunt.tried.items() if hunt.state(n) != "illegal"]
    gpus = hunt.scenario.cluster.node.gpus
    if not planned_rows:
        missing = _nothing_planned(hunt)
    else:
        nodes, nearest = min(planned_rows, key=lambda row: _distance(hunt, *row))
        missing = f"the nearest is {plural(nodes * gpus, 'GPU')}: {hunt.why(nearest)}"
    return Recommendation(
        question="fewest_gpus",
        found=False,
        answer=f"no cluster of these nodes does it {_goal_text(hunt.goal)}",
        missing=missing,
        attempts=hunt.attempts(),
        assumptions=_judged(hunt),
    )


def _nothing_planned(hunt: Hunt) -> str:
    """Returns why no size was planned: none is legal, or the least at the peak is too large."""
    cluster = hunt.scenario.cluster
    least = least_nodes(hunt.scenario, hunt.goal) * cluster.node.gpus
    most = max(hunt.every) * cluster.node.gpus
    if least <= most:
        return "no size has a legal plan"
    return (
        f"at the datasheet's peak it takes {plural(least, 'GPU')} at least, "
        f"{least - most:,} more than the {most:,} looked at"
    )


def _distance(hunt: Hunt, nodes: int, found: Planned) -> tuple[int, float]:
    """Returns how far a size is from the goal: whether it fits, then by what factor it fails."""
    run, goal = found.run, hunt.goal
    if run is None:
        return 1, found.missing_bytes
    late = days_of(run, goal.sure) * DAY_S / goal.deadline_s if goal.deadline_s else 0.0
    cost = usd_of(run, goal.sure)
    dear = cost / goal.budget_usd if goal.budget_usd and cost is not None else 0.0
    return 0, max(late, dear)
