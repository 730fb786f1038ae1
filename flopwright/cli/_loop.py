"""Parts of `flopwright rollouts` that plan a loop: search, campaign, trace, plan file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from flopwright.cli._rollout_options import Targets
    from flopwright.planner.rollouts.result import LoopResult, RankedLoop
    from flopwright.simulator.rollouts.record import RoundRecord
    from flopwright.spec.loop import LoopScenario
    from flopwright.spec.rollout import RolloutScenario
    from flopwright.spec.yaml_lines import Document

EXIT_DOES_NOT_FIT = 1
# Rounds before the one that is drawn: parked attempts are there, and logs stay small.
_ROUNDS_BEFORE_LOG = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """How much to simulate, and how to show it."""

    rounds: int | None
    seed: int | None
    as_json: bool
    progress: Any


def loop_asked(
    document: Document, stop_fraction: float | None, max_staleness: float | None
) -> LoopScenario:
    """Returns the loop of a document under a lambda and a bound on staleness."""
    from flopwright.spec.loop import at_stop_fraction, loop_from, within_staleness

    loop = loop_from(document)
    if stop_fraction is not None:
        loop = at_stop_fraction(loop, stop_fraction)
    return loop if max_staleness is None else within_staleness(loop, max_staleness)


def round_asked(document: Document, stop_fraction: float | None) -> RolloutScenario:
    """Returns the round of a document under a lambda."""
    from flopwright.spec.rollout import RolloutScenario, with_stop_fraction
    from flopwright.spec.validate import validate

    spec = validate(RolloutScenario, document)
    return spec if stop_fraction is None else with_stop_fraction(spec, stop_fraction)


def logged_round(scenario: RolloutScenario, seed: int) -> RoundRecord:
    """Returns a round with its log, a few rounds after the start."""
    from flopwright.planner.rollouts.simulated import loop_for
    from flopwright.simulator.rollouts.rounds import simulate_rounds

    rounds = _ROUNDS_BEFORE_LOG + 1
    kind = loop_for(scenario, rounds)
    return simulate_rounds(scenario, rounds, seed, loop=kind, log=True)[-1]


def write_trace(path: Path, scenario: RolloutScenario, record: RoundRecord) -> None:
    """Writes a round as a Chrome trace, compressed where the name ends in .gz."""
    from flopwright.report.trace import trace_bytes
    from flopwright.simulator.calibration.files import write_atomically
    from flopwright.simulator.rollouts.round_trace import round_trace

    data = round_trace(record, name=scenario.name)
    write_atomically(path, trace_bytes(data, zipped=path.suffix == ".gz"))


def plan_loop(
    loop: LoopScenario, asked: Asked, files: Targets, *, time_limit_s: float, top: int
) -> None:
    """Searches a loop, prints what was found and writes the files asked for."""
    from flopwright.planner.rollouts.search import search_loop
    from flopwright.planner.rollouts.text import search_lines

    with asked.progress("choices", asked.as_json) as advance:
        result = search_loop(
            loop,
            rounds=asked.rounds,
            seed=asked.seed,
            time_limit_s=time_limit_s,
            top_k=top,
            progress=advance,
        )
    if result.best is not None:
        _write(result, result.best, files)
    if asked.as_json:
        typer.echo(json.dumps(search_data(result)))
    else:
        lines = [*search_lines(result), "", "assumed:"]
        lines += [f"  {text.replace(': assumed: ', ': ', 1)}" for text in result.assumptions]
        typer.echo("\n".join(lines))
        for path in (files.out, files.png, files.trace):
            if path is not None and result.best is not None and path.is_file():
                typer.echo(f"wrote {path}")
        if files.trace is not None and result.best is not None and not files.trace.is_file():
            typer.echo(f"{files.trace} not written: an asynchronous loop has no rounds to draw")
    if result.best is None:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _write(result: LoopResult, best: RankedLoop, files: Targets) -> None:
    from flopwright.planner.rollouts.figure import search_png
    from flopwright.simulator.calibration.files import write_atomically
    from flopwright.spec.load import dump_yaml

    if files.out is not None:
        header = f"{best.words}\nMade by flopwright rollouts; do not edit: hashes are checked."
        write_atomically(files.out, dump_yaml(best.plan, header).encode())
    if files.png is None and files.trace is None:
        return
    scenario = best.scenario
    rounds = best.outcome.report is not None
    record = logged_round(scenario, result.seed) if rounds else None
    if files.png is not None:
        write_atomically(files.png, search_png(result, record, scenario.kv_capacity_tokens))
    if files.trace is not None and record is not None:
        write_trace(files.trace, scenario, record)


def search_data(result: LoopResult) -> dict[str, Any]:
    """Returns a search as plain data; the scenario and single rounds stand once or not at all."""
    data = result.to_data()
    data["complete"] = result.complete
    data["ended_early"] = list(result.ended_early)
    for group in ("ranked", "front"):
        for place, entry in enumerate(data.get(group, [])):
            entry.pop("scenario")
            entry["plan"].pop("scenario")
            report = entry["outcome"].pop("report", None)
            if group == "ranked" and place == 0 and report is not None:
                report.pop("rounds")
                entry["outcome"]["report"] = report
    data["infeasible"] = [
        entry.to_data() | {"violations": [v.as_dict() for v in entry.violations]}
        for entry in result.infeasible
    ]
    return data


def run_campaign(
    scenario: RolloutScenario, asked: Asked, png: Path | None, *, growth: float
) -> None:
    """Compares fixed concurrencies with a throttle over rounds whose lengths grow."""
    from flopwright.planner.rollouts.campaign import campaign
    from flopwright.planner.rollouts.figure import campaign_png
    from flopwright.planner.rollouts.text import campaign_lines
    from flopwright.simulator.calibration.files import write_atomically

    with asked.progress("policies", asked.as_json) as advance:
        found = campaign(
            scenario,
            rounds=asked.rounds or 100,
            growth=growth,
            seed=asked.seed,
            progress=advance,
        )
    if png is not None:
        write_atomically(png, campaign_png(found))
    if asked.as_json:
        data = found.to_data() | {"behind": found.behind, "worst_round": found.worst_round}
        data |= {"storm": found.storm, "fixed_behind": found.fixed_behind}
        typer.echo(json.dumps(data | {"first_best": found.first_best.name}))
        return
    typer.echo("\n".join(campaign_lines(found)))
    if png is not None:
        typer.echo(f"\nwrote {png}")
