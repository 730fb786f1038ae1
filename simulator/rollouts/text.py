"""A round report and a lambda sweep as lines of text for people."""

from __future__ import annotations

from flopwright.simulator.rollouts.record import PHASES
from flopwright.simulator.rollouts.report import RoundReport
from flopwright.simulator.rollouts.sweep import LambdaSweep
from flopwright.units import plural, show_bytes, show_count, show_seconds


def report_lines(report: RoundReport) -> list[str]:
    """Returns the report: time by phase, idle share, tail, staleness, KV peak, theory."""
    steady, theory = report.steady, report.closed_forms
    per_gpu = steady.tokens_per_s / report.num_gpus
    lines = [
        f"{report.scenario}: lambda {report.stop_fraction:g}: {report.stop_count:,} of "
        f"{plural(report.attempts_in_flight, 'attempt')} in flight "
        f"{'ends' if report.stop_count == 1 else 'end'} a round; {_outcome(report)}",
        f"mean of {plural(len(report.rounds), 'steady round')} after "
        f"{report.warmup_rounds} of warm-up, seed {report.seed}",
        "",
        f"round                  {show_seconds(steady.round_time_s):>10}",
    ]
    for phase in PHASES:
        seconds = steady.time_s[phase]
        share = seconds / steady.round_time_s if steady.round_time_s else 0.0
        name = phase.replace("_", " ")
        lines.append(f"  {name:<20} {show_seconds(seconds) if seconds else '-':>10} {share:>6.1%}")
    lines += [
        f"throughput             {report.attempts_per_s:.4g} attempts/s "
        f"(+- {report.attempts_per_s_error:.2g}), {show_count(steady.tokens_per_s)} tokens/s, "
        f"{show_count(per_gpu)} tokens/s a GPU",
        f"idle slots             {steady.gpu_idle_share:.1%} of slot time in generation",
        f"tail                   {show_seconds(steady.tail_s) if steady.tail_s else 'none'}"
        " with at most a tenth of the attempts left",
        f"staleness              mean {report.mean_staleness:.3f} versions behind at completion "
        f"({histogram_text(steady.staleness)})",
        f"  when trained on      mean {report.mean_trained_staleness:.3f} "
        f"({histogram_text(report.trained_staleness)}): a prompt waits for all its samples",
        f"  stale tokens         {report.off_policy_share:.1%} of completed tokens are from older "
        "versions",
        _kv_line(report),
        f"parked                 {show_count(steady.parked_tokens)} generated tokens"
        + (
            f", {show_bytes(report.parked_bytes)} of KV with prompts"
            if report.parked_bytes
            else ""
        )
        + " between rounds",
        "",
        _theory_line(report, theory),
    ]
    return lines


def _outcome(report: RoundReport) -> str:
    """Returns what became of the attempts of the mean round: ties may complete more."""
    done, parked = report.steady.completed, report.parked_attempts
    waiting = report.attempts_in_flight - done - parked
    parts = [f"{done:,} complete"]
    if parked:
        parts.append(f"{parked:,} are parked")
    if waiting > 0:
        parts.append(f"{waiting:,} have not started")
    return ", ".join(parts)


def assumption_lines(report: RoundReport) -> list[str]:
    """Returns what was assumed, for a list that is already headed so.

    A source in a scenario file says "assumed" of itself; under the heading it need not.
    """
    return [
        text.replace(": assumed: ", ": ", 1).removesuffix(": assumed")
        for text in report.assumptions
    ]


def _kv_line(report: RoundReport) -> str:
    peak = f"KV peak                {show_count(report.steady.kv_peak_tokens)} tokens"
    if report.kv_peak_bytes:
        peak += f", {show_bytes(report.kv_peak_bytes)}"
    peak += " on the fullest instance"
    if report.kv_capacity_bytes is None:
        return peak
    capacity = show_bytes(report.kv_capacity_bytes)
    if report.kv_fits:
        return f"{peak}, of {capacity}"
    return f"{peak}: ABOVE its {capacity}; preemption would slow it down further"


def _theory_line(report: RoundReport, theory: dict[str, float]) -> str:
    parts = [f"staleness {theory['mean_staleness']:.3f}"]
    if "generation_s" in theory:
        parts.insert(0, f"generation {show_seconds(theory['generation_s'])}")
    if "off_policy_share" in theory:
        parts.append(f"stale tokens {theory['off_policy_share']:.1%}")
    parts.append(f"mean length {show_count(theory['mean_length'])}")
    parts.append(
        f"longest of {report.attempts_in_flight:,}: {show_count(theory['expected_longest'])}"
    )
    return "closed forms           " + ", ".join(parts)


def histogram_text(histogram: dict[int, int], most: int = 4) -> str:
    """Returns a staleness histogram as "0: 90.0 %, 1: 9.1 %, 2+: 0.9 %"."""
    total = max(1, sum(histogram.values()))
    last = max(histogram, default=0)
    parts = [f"{k}: {histogram.get(k, 0) / total:.1%}" for k in range(min(last, most) + 1)]
    if last > most:
        rest = sum(n for k, n in histogram.items() if k > most)
        parts.append(f"{most + 1}+: {rest / total:.1%}")
    return ", ".join(parts)


def sweep_lines(sweep: LambdaSweep) -> list[str]:
    """Returns the sweep as a table, the best lambda, and what it trades."""
    base = sweep.synchronous
    lines = [
        "lambda  attempts/s  +-      gain  generation (s)  idle   tail (s)  staleness  trained  "
        "stale tokens  parked (GiB)",
    ]
    for index, p in enumerate(sweep.points):
        mark = " <- best" if index == sweep.best else ""
        lines.append(
            f"{p.stop_fraction:<7g} {p.attempts_per_s:<11.4g} {p.attempts_per_s_error:<7.2g} "
            f"{p.attempts_per_s / base.attempts_per_s:<5.2f} "
            f"{p.steady.time_s['generation']:<15.1f} {p.steady.gpu_idle_share:<6.1%} "
            f"{p.steady.tail_s:<9.1f} {p.mean_staleness:<10.3f} {p.mean_trained_staleness:<8.3f} "
            f"{p.off_policy_share:<13.1%} {p.parked_bytes / 2**30:<.1f}{mark}"
        )
    return [*lines, "", *_verdict(sweep)]


def _verdict(sweep: LambdaSweep) -> list[str]:
    best, base = sweep.best_point, sweep.synchronous
    bound = sweep.max_mean_staleness
    limit = "" if bound is None else f" within a mean staleness of {bound:g}"
    lines = [f"best lambda{limit}: {best.stop_fraction:g}, {best.attempts_per_s:.4g} attempts/s"]
    if best.stop_fraction < base.stop_fraction:
        lines.append(
            f"it trades: {best.attempts_per_s / base.attempts_per_s:.2f}x the attempts/s of "
            f"lambda {base.stop_fraction:g} for {best.mean_staleness:.2f} versions of staleness "
            f"({best.mean_trained_staleness:.2f} when trained on), {best.off_policy_share:.0%} of "
            f"tokens from older versions, {show_count(best.steady.parked_tokens)} parked tokens"
        )
    calm = sweep.calmest_point
    if sweep.calmest != sweep.best:
        lines.append(
            f"nearly as fast and fresher: lambda {calm.stop_fraction:g}, "
            f"{calm.attempts_per_s / best.attempts_per_s:.1%} of that at "
            f"{calm.mean_staleness:.2f} versions"
        )
    lines.append(f"what binds: {sweep.binding}")
    return lines
