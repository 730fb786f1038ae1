"""A loop search and a campaign as lines of text for people."""

from __future__ import annotations

from flopwright.plan.loop import PER, PLACE_WORDS, LoopPlan
from flopwright.planner.rollouts.campaign import Campaign
from flopwright.planner.rollouts.outcome import Outcome
from flopwright.planner.rollouts.result import LoopResult, RankedLoop
from flopwright.units import plural, show_bytes, show_count, show_seconds

_BIND_WORDS = {
    "tail": "the latency tail: attempts longer than the mean",
    "tokens": "tokens: what more attempts add to a step",
    "context": "reading the cache of contexts",
    "cache": "the size of the cache",
    "update": "the update",
    "switch": "the switch between phases",
    "sync": "the weight synchronisation",
    "sandboxes": "sandboxes: starting, waking, waiting for room",
    "tools": "tool calls",
}


def search_lines(result: LoopResult) -> list[str]:
    """Returns the best loop in full, the others, the front, what does not fit, what binds."""
    best = result.best
    lines = [_counts(result), ""]
    if best is None:
        early = "nothing that fits was found before the search ended"
        lines.append(early if result.ended_early else "nothing fits")
    else:
        lines += [*_best_lines(best), "", *_bind_lines(result), "", *_table(result)]
    return [*lines, *_infeasible_lines(result)]


def _counts(result: LoopResult) -> str:
    text = (
        f"{result.scenario}: {plural(result.candidates, 'choice')}, {result.simulated:,} simulated"
        f", {result.ruled_out:,} ruled out by their bound, in {show_seconds(result.seconds)}"
    )
    early = "".join(f"\n  ENDED EARLY: {words}" for words in result.ended_early)
    if "the time was up" in early:
        early += "\n  (--time-limit gives it more)"
    return text + _covered(result) + early


def _covered(result: LoopResult) -> str:
    """Returns what a search from coarse to fine looked at, and what may be left."""
    cover = result.coverage
    if cover is None:
        return ""
    text = (
        f"\n  from coarse to fine: {plural(cover.structures, 'structure')} and "
        f"{plural(cover.bounded, 'choice')} bounded in closed form, {cover.screened:,} looked at "
        "for a round"
    )
    if cover.settled:
        text += "; no neighbour of the best is better"
    if not cover.gap:
        return f"{text}; nothing else can be faster"
    return f"{text}; no other choice can be more than {cover.gap:.0%} faster"


def _best_lines(best: RankedLoop) -> list[str]:
    plan, out = best.plan, best.outcome
    iteration = out.iteration
    lines = [
        f"best: {best.words}",
        f"  generates          {plan.generation.gpus} GPUs: {plan.generation.label()}",
        f"  trains             {_update_words(plan)}",
        f"  hands over         {_hand_over_words(plan)}",
        *_lent_lines(best),
        f"iteration            {show_seconds(iteration.round_time_s):>10}"
        f"   {out.gpu_hours:,.1f} GPU-hours{_money(out.usd)}",
    ]
    for phase, seconds in iteration.time_s.items():
        share = seconds / iteration.round_time_s if iteration.round_time_s else 0.0
        shown = show_seconds(seconds) if seconds else "-"
        lines.append(f"  {phase.replace('_', ' '):<18} {shown:>10} {share:>6.1%}")
    lines += [
        f"throughput           {out.attempts_per_s:.4g} attempts/s, "
        f"{show_count(iteration.tokens_per_s)} tokens/s, "
        f"{show_count(iteration.tokens_per_s / out.gpus)} tokens/s a GPU",
        f"staleness            mean {out.mean_staleness:.3f} versions behind{_stale_tokens(out)}",
        f"cache                {_cache_words(best)}",
        f"tail                 {show_seconds(iteration.tail_s) if iteration.tail_s else 'none'}"
        f" with at most a tenth of the attempts left; {iteration.gpu_idle_share:.1%} idle slots",
        "memory",
        *(f"  {line}" for line in memory_lines(plan)),
    ]
    return lines


def _stale_tokens(out: Outcome) -> str:
    if out.report is None:
        return " when trained on"
    return f"; {out.report.off_policy_share:.1%} of completed tokens are from older versions"


def _money(usd: float | None) -> str:
    return "" if usd is None else f", ${usd:,.2f}"


def _update_words(plan: LoopPlan) -> str:
    split = plan.update.parallel
    how = "as the scenario states it" if split is None else split.label()
    return f"{plan.update.gpus} GPUs: {how}"


def _hand_over_words(plan: LoopPlan) -> str:
    over = plan.hand_over
    sync = f"weights reach every instance in {show_seconds(over.weight_sync_s)}"
    if plan.layout != "colocated":
        return sync
    where = f"training states wait in {PLACE_WORDS[over.states]}"
    out, back = show_seconds(over.to_update_s), show_seconds(over.to_generation_s)
    return f"{where}; {out} to the update, {back} back; {sync}"


def _lent_lines(best: RankedLoop) -> list[str]:
    over = best.plan.hand_over
    if not over.lent_gpus:
        return []
    return [
        f"  lends              {over.lent_gpus} GPUs that train generate while they wait, "
        f"{best.outcome.lent_share:.0%} of the time; {show_seconds(over.lend_s)} until they do, "
        f"{show_seconds(over.give_back_s)} back"
    ]


def _cache_words(best: RankedLoop) -> str:
    out = best.outcome
    peak = show_count(out.iteration.kv_peak_tokens)
    text = f"peak {peak} tokens on the fullest instance"
    if out.kv_use is not None:
        text += f", {min(out.kv_use, 1.0):.0%} of it"
    return text + f"; {plural(out.iteration.preemptions, 'preemption')} an iteration"


def memory_lines(plan: LoopPlan) -> list[str]:
    """Returns a line a place and phase: what lies there, of how much."""
    lines = []
    for budget in plan.memory:
        parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in budget.holds.items())
        head = f"{budget.phase}, {PLACE_WORDS[budget.place]}"
        if budget.gpus == "update" and budget.phase == "generation":
            head += " of the trainer"
        lines.append(
            f"{head:<28} {show_bytes(budget.used_bytes):>9} of {show_bytes(budget.limit_bytes)} "
            f"{PER[budget.place]}" + (f": {parts}" if parts else "")
        )
    return lines or ["not checked: the scenario names no cluster"]


def _bind_lines(result: LoopResult) -> list[str]:
    lines = ["what binds (how much faster without it):"]
    for name, gain in result.binds.items():
        if abs(gain) >= 0.001:
            lines.append(f"  {gain:>+7.1%}  {_BIND_WORDS.get(name, name)}")
    return lines if len(lines) > 1 else [*lines, "  nothing that was tried"]


def _table(result: LoopResult) -> list[str]:
    lines = ["attempts/s  versions behind  iteration   $ an iteration  choice"]
    lines += [_row(loop) for loop in result.ranked]
    lines += ["", "throughput against staleness: of what was simulated, nothing is both faster"]
    lines += ["and fresher than one of these"]
    return [*lines, *(_row(loop) for loop in result.front), ""]


def _row(loop: RankedLoop) -> str:
    out = loop.outcome
    usd = "-" if out.usd is None else f"{out.usd:,.2f}"
    return (
        f"{out.attempts_per_s:<11.4g} {out.mean_staleness:<16.3f} "
        f"{show_seconds(out.iteration.round_time_s):<11} {usd:<15} {loop.words}"
    )


def _infeasible_lines(result: LoopResult) -> list[str]:
    if not result.infeasible:
        return []
    lines = ["does not fit or breaks a goal:"]
    for loop in result.infeasible:
        most = loop.most_attempts_per_s
        could = f" (at most {most:.4g} attempts/s)" if most else ""
        lines.append(f"  {loop.words}{could}")
        lines += [f"    {violation}" for violation in loop.violations]
    return lines


def campaign_lines(found: Campaign) -> list[str]:
    """Returns policies over all rounds, and how far the throttle is behind the optimum."""
    last = max(1, found.rounds // 10)
    lines = [
        f"{found.scenario}: {found.rounds} rounds of {found.attempts:,} attempts, lengths grow "
        f"{found.growth:g}x",
        "policy        all rounds  first   last tenth, mean  preemptions an attempt, last tenth",
    ]
    for run in (*found.fixed, found.throttled):
        storm = sum(run.preemptions[-last:]) / (last * found.attempts)
        mark = "  <- best in round 1" if run is found.first_best else ""
        lines.append(
            f"{run.name:<13} {show_seconds(run.total_s):<11} {show_seconds(run.round_s[0]):<7} "
            f"{show_seconds(sum(run.round_s[-last:]) / last):<17} {storm:.2f}{mark}"
        )
    optimum = sum(found.optimum_s)
    lines += [
        f"best of each round: {show_seconds(optimum)} in all",
        f"the first round's best ({found.first_best.name}) ends {found.fixed_behind:.0%} behind "
        f"it, with {found.storm:.1f} preemptions an attempt",
        f"the throttle is {found.behind:+.1%} behind it over all rounds, "
        f"{found.worst_round:+.1%} in its worst round",
    ]
    return lines
