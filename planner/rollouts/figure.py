"""A loop search and a campaign as pictures."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from flopwright.planner.rollouts.campaign import Campaign, CampaignRun
from flopwright.planner.rollouts.outcome import Outcome
from flopwright.planner.rollouts.result import LoopResult, RankedLoop
from flopwright.simulator.rollouts.figure import (
    BLUE,
    GREY,
    LIGHT,
    PHASE_COLOURS,
    RED,
    draw_completions,
    draw_staleness,
    head,
    new_figure,
    png_bytes,
)
from flopwright.simulator.rollouts.figure_cache import draw_cache
from flopwright.simulator.rollouts.record import RoundRecord

_LAYOUT_COLOURS: Final = {
    "colocated": BLUE,
    "disaggregated": "#f2b134",
    "one_step_off": "#5b9a5f",
    "async": "#7d5ba6",
}


def search_png(
    result: LoopResult, record: RoundRecord | None, capacity_tokens: int | None
) -> bytes:
    """Returns a search as PNG bytes: the best loop's round, the front, phases, what binds.

    Args:
        record: a round of the best loop, with its log; None where it has no rounds.
        capacity_tokens: of an instance of the best loop; None: never short.

    Raises:
        InputError: matplotlib is not installed.
    """
    best = result.best
    assert best is not None
    report = best.outcome.report
    drawn = report is not None and record is not None
    figure = new_figure(16.0, 9.4 if drawn else 5.4)
    axes = figure.subplots(2 if drawn else 1, 3, squeeze=False)
    if report is not None and record is not None:
        draw_completions(axes[0][0], report, None)
        draw_cache(axes[0][1], record, capacity_tokens)
        draw_staleness(axes[0][2], report)
    _front(axes[-1][0], result)
    _phases(axes[-1][1], result.front)
    _binds(axes[-1][2], result.binds)
    return png_bytes(figure, f"{result.scenario}: best is {best.words}")


def _front(axis: Any, result: LoopResult) -> None:
    """Draws throughput against staleness; the line joins what nothing beats."""
    x = [r.outcome.mean_staleness for r in result.front]
    y = [r.outcome.attempts_per_s for r in result.front]
    axis.step(x, y, where="post", color=GREY, linewidth=1.2, zorder=1)
    seen: set[str] = set()
    for ranked in (*result.ranked, *result.front):
        layout = ranked.plan.layout
        axis.plot(
            [ranked.outcome.mean_staleness], [ranked.outcome.attempts_per_s], "o",
            color=_LAYOUT_COLOURS[layout], markersize=7,
            label=None if layout in seen else layout.replace("_", "-"),
        )  # fmt: skip
        seen.add(layout)
    width, height = max([*x, 1e-12]) - min([*x, 0.0]), max([*y, 1e-12])
    last: tuple[float, float] | None = None
    for i, ranked in reversed(list(enumerate(result.front))):
        here = (x[i] / max(width, 1e-12), y[i] / height)
        if (
            last is not None
            and max(abs(here[0] - last[0]) / 0.2, abs(here[1] - last[1]) / 0.06) < 1
        ):
            continue  # its words would lie on the last ones
        last = here
        axis.annotate(
            _short(ranked),
            (x[i], y[i]),
            xytext=(6, -11),
            textcoords="offset points",
            fontsize=8,
        )
    axis.set_ylim(bottom=0)
    axis.margins(x=0.22)
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    head(axis, "throughput against staleness", "mean policy versions behind", "attempts/s")


def _short(ranked: RankedLoop) -> str:
    plan = ranked.plan
    if plan.layout == "async":
        return f"bound {plan.staleness_bound}"
    return f"lambda {plan.generation.stop_fraction:g}"


def _phases(axis: Any, front: tuple[RankedLoop, ...]) -> None:
    """Draws seconds by phase of the loops of the front, each for 1,000 completed attempts."""
    names = [_short(r) for r in front]
    left = np.zeros(len(front))
    phases = list(dict.fromkeys(p for r in front for p in r.outcome.iteration.time_s))
    for phase in phases:
        seconds = np.array([_per_thousand(r.outcome, phase) for r in front])
        if seconds.any():
            axis.barh(
                range(len(front)), seconds, left=left,
                color=PHASE_COLOURS.get(phase, LIGHT), label=phase.replace("_", " "),
            )  # fmt: skip
        left += seconds
    axis.set_yticks(range(len(front)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, max(left.max(), 1e-12) * 1.02)
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=3)
    head(axis, "time by phase along the front", "s for 1,000 completed attempts", "")
    axis.grid(visible=False, axis="y")


def _per_thousand(out: Outcome, phase: str) -> float:
    done = out.attempts_per_s * out.iteration.round_time_s
    return 1000 * out.iteration.time_s.get(phase, 0.0) / done if done else 0.0


def _binds(axis: Any, binds: dict[str, float]) -> None:
    """Draws by how much faster the best loop would be without each thing."""
    shown = dict(list(binds.items())[:8])
    gains = [100 * g for g in shown.values()]
    bars = axis.barh(list(shown), gains, color=[RED if g > 0 else GREY for g in gains])
    axis.bar_label(bars, [f"{g:+.1f} %" for g in gains], fontsize=9, padding=3)
    axis.invert_yaxis()
    axis.margins(x=0.2)
    head(axis, "what binds: throughput without it", "% more attempts/s", "")
    axis.grid(visible=False, axis="y")


def campaign_png(found: Campaign) -> bytes:
    """Returns a campaign as PNG bytes: times of every policy, over the optimum, preemptions.

    Raises:
        InputError: matplotlib is not installed.
    """
    figure = new_figure(16.0, 5.2)
    axes = figure.subplots(1, 3)
    rounds = np.arange(1, found.rounds + 1)
    _lines(axes[0], found, rounds, lambda run: np.array(run.round_s))
    axes[0].plot(rounds, found.optimum_s, color="black", linewidth=1, linestyle=":")
    head(axes[0], "time of a round (dotted: best fixed of each round)", "round", "s")
    least = np.array(found.optimum_s)
    _lines(axes[1], found, rounds, lambda run: np.array(run.round_s) / least)
    axes[1].axhline(1.1, color=GREY, linewidth=1, linestyle="--")
    axes[1].set_ylim(0.9, 2.0)
    head(axes[1], "over the best of each round (dashed: 10 %)", "round", "times the optimum")
    _lines(axes[2], found, rounds, lambda run: np.array(run.preemptions) / found.attempts)
    axes[2].legend(frameon=False, fontsize=8, loc="upper left")
    head(axes[2], "preemptions", "round", "an attempt in flight")
    title = (
        f"{found.scenario}: lengths grow {found.growth:g}x over {found.rounds} rounds; "
        f"throttle {found.behind:+.1%} against the best of each round"
    )
    return png_bytes(figure, title)


def _lines(axis: Any, found: Campaign, rounds: Any, of: Any) -> None:
    first: CampaignRun = found.first_best
    for run in found.fixed:
        if run is not first:
            axis.plot(rounds, of(run), color="#d8d8d8", linewidth=0.9)
    axis.plot(rounds, of(first), color=RED, linewidth=1.8, label=f"{first.name}: best in round 1")
    axis.plot(rounds, of(found.throttled), color=BLUE, linewidth=1.8, label="throttle")
    axis.plot([], [], color="#d8d8d8", label="other fixed concurrencies")
