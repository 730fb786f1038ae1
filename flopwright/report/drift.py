"""Has a plan become slower? A series of runs on one machine, and whether its level has moved.

The logarithms of a series are taken as levels plus noise. Changes of level are found by binary
segmentation: of all places where the series could be cut, the one whose two sides differ most
(Student's t of their means) counts as a change if so large a difference is improbable without
one, and its sides are cut again. After that the last part is asked for a slope, for what creeps.
The alarm is about now: the last level, or the end of the slope, lies above the level before.

False alarms. `false_alarm` bounds the probability that a look at a series without a change
finds any: half of it for cuts (each place's p-value is multiplied by the number of places, which
is Bonferroni's bound), half for the slope. It holds for independent noise of any size, which
is estimated from the series itself. Positive correlation between neighbours, as a busy
afternoon makes it, widens the noise by (1 + r) / (1 - r).

Outliers. Before anything is tested, values are drawn to within 2.5 deviations of the median of
their neighbours, so that one odd run, the newest among them, moves nothing: a change needs three
runs behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from flopwright.report.metrics import Fingerprint, Measurement, StepMetrics
from flopwright.spec.base import Spec
from flopwright.units import plural

Array = NDArray[np.float64]

FALSE_ALARM: Final = 1e-3
LEAST_SHIFT: Final = 0.03
# Fewer runs can show no change.
LEAST_RUNS: Final = 6
_LEAST_BEFORE, _LEAST_AFTER = 3, 3
_NORMAL: Final = 1.4826  # deviation over median size of normal noise
_CLIP: Final = 2.5
_WINDOW: Final = 3  # neighbours on either side
# Noise that is known (a noise floor) counts as so many runs.
_NOISE_RUNS: Final = 6.0
# A series without any scatter is a clock too coarse, not certainty.
_LEAST_NOISE: Final = 1e-3

By = Literal["hardware", "stack"]


class Change(Spec):
    """One change of level: `index` is the first run after it.

    Attributes:
        shift: level after / level before - 1; of a slope its end / its beginning - 1.
        p_value: of so large a change without any, all places that were looked at counted.
    """

    index: NonNegativeInt
    shift: float
    p_value: NonNegativeFloat
    kind: Literal["step", "slope"] = "step"


class Drift(Spec):
    """What a series says.

    Attributes:
        alarm: whether it is slower now, by at least the shift that was asked about.
        shift: now / before the unbroken row of slowdowns that led to now - 1; without any
            slowdown at the end, what the last change was (0 where there is none).
        since: first run that is slower; None without an alarm.
        noise_log: how runs scatter around their level (log).
    """

    runs: NonNegativeInt
    alarm: bool
    shift: float
    since: NonNegativeInt | None = None
    changes: tuple[Change, ...]
    noise_log: NonNegativeFloat
    false_alarm: PositiveFloat

    def text(self) -> str:
        """Returns the finding on one line."""
        if self.runs < LEAST_RUNS:
            return f"{plural(self.runs, 'run')}: too few to tell ({LEAST_RUNS} are needed)"
        if self.alarm and self.since is not None:
            return f"slower by {self.shift:.1%} since run {self.since + 1} of {self.runs}"
        if self.changes:
            return f"no slowdown now; last change {self.changes[-1].shift:+.1%}"
        return f"steady over {self.runs} runs, which scatter by {self.noise_log:.1%}"


class PlanDrift(Spec):
    """A plan's series on one machine.

    Attributes:
        where: the machine in words; ids of the measurements, oldest first.
        since_id, since_created: the first slower run; "" without an alarm.
        software: what differs between the first slower run and the one before it, by package:
            (before, after); nothing else about the two differs.
    """

    plan_name: str
    where: str
    ids: tuple[str, ...]
    drift: Drift
    since_id: str = ""
    since_created: str = ""
    software: dict[str, tuple[str, str]] = Field(default_factory=dict)

    @property
    def alarm(self) -> bool:
        """Whether the plan is slower now."""
        return self.drift.alarm

    def text(self) -> str:
        """Returns the finding on one line."""
        changed = ", ".join(f"{n} {a} -> {b}" for n, (a, b) in self.software.items())
        since = f" ({self.since_created}, {self.since_id})" if self.alarm else ""
        because = f"; software that changed then: {changed}" if changed else ""
        return f"{self.plan_name} on {self.where}: {self.drift.text()}{since}{because}"


def find_drifts(
    measurements: Iterable[Measurement],
    *,
    by: By = "hardware",
    false_alarm: float = FALSE_ALARM,
    least: float = LEAST_SHIFT,
) -> tuple[PlanDrift, ...]:
    """Returns the drift of each plan on each machine, alarms first.

    Args:
        measurements: of steps; others are left out.
        by: "hardware" lets the software differ along a series, so that a new version that is
            slower raises the alarm; "stack" compares within equal software only.
        false_alarm, least: see `drift_of`.
    """
    found = [_of_plan(runs, false_alarm, least) for runs in plan_series(measurements, by)]
    return tuple(sorted(found, key=lambda d: (not d.alarm, -d.drift.shift, d.plan_name)))


def plan_series(
    measurements: Iterable[Measurement], by: By = "hardware"
) -> list[list[Measurement]]:
    """Returns the runs of each plan on each machine, oldest first; measurements of steps alone."""
    series: dict[tuple[str, str, str], list[Measurement]] = {}
    for m in measurements:
        if isinstance(m.metrics, StepMetrics):
            where = m.fingerprint.stack_id() if by == "stack" else hardware_id(m.fingerprint)
            series.setdefault((_plan_key(m), where, m.fingerprint.host), []).append(m)
    return [sorted(runs, key=lambda m: (m.created, m.id)) for runs in series.values()]


def place_of(where: Fingerprint) -> str:
    """Returns the name of a machine: its GPU or processor, and the host where one was said."""
    kind = where.gpu or where.processor
    return f"{where.host} ({kind})" if where.host else kind


def hardware_id(where: Fingerprint) -> str:
    """Returns what is equal for runs on equal machines with as many ranks."""
    parts = (where.processor, where.gpu, where.num_cores, where.world_size, where.threads_per_rank)
    return "|".join(map(str, parts))


def _plan_key(m: Measurement) -> str:
    """Returns what is equal for runs of equal plans on equal scenarios, whatever their names."""
    hashes = [str(m.plan.get(k, "")) for k in ("scenario_hash", "parallel_hash")]
    return "|".join(hashes) if any(hashes) else m.plan_name


def _of_plan(runs: Sequence[Measurement], false_alarm: float, least: float) -> PlanDrift:
    drift = drift_of([m.metrics.step_time_s for m in runs], false_alarm=false_alarm, least=least)
    last = runs[-1]
    found = PlanDrift(
        plan_name=last.plan_name,
        where=f"{place_of(last.fingerprint)}, {last.fingerprint.world_size} ranks",
        ids=tuple(m.id for m in runs),
        drift=drift,
    )
    if drift.since is None:
        return found
    first = runs[drift.since]
    before = _software(runs[drift.since - 1].fingerprint)
    after = _software(first.fingerprint)
    changed = {
        name: (before.get(name, "-"), after.get(name, "-"))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    }
    return found.model_copy(
        update={"since_id": first.id, "since_created": first.created, "software": changed}
    )


def _software(where: Fingerprint) -> Mapping[str, str]:
    return {**where.packages, "python": where.python, "flopwright": where.tool_version}


def drift_of(
    series: Sequence[float],
    *,
    noise: float | None = None,
    false_alarm: float = FALSE_ALARM,
    least: float = LEAST_SHIFT,
) -> Drift:
    """Returns what a series of positive values (seconds, or measured / predicted) says.

    Args:
        series: oldest first, one a run; larger is slower.
        noise: how one run scatters (as a share), where that is known; it counts as a few runs.
        false_alarm: bound of the probability that a series without a change shows any.
        least: smallest slowdown that is worth an alarm, as a share.
    """
    logs = np.log(np.asarray(series, float))
    if len(logs) < LEAST_RUNS:
        return Drift(
            runs=len(logs), alarm=False, shift=0.0, since=None, changes=(), noise_log=0.0,
            false_alarm=false_alarm,
        )  # fmt: skip
    calm = _calmed(logs, noise)
    cuts = _sure(calm, _cuts(calm, 0, noise, false_alarm / 2), noise, false_alarm / 2)
    start = cuts[-1].index if cuts else 0
    slope = _slope(calm[start:], start, noise, false_alarm / 2)
    changes = (*cuts, *([slope] if slope else []))
    shift, since = _slowdown(changes)
    alarm = since is not None and shift >= least
    return Drift(
        runs=len(logs),
        alarm=alarm,
        shift=shift if since is not None else changes[-1].shift if changes else 0.0,
        since=since if alarm else None,
        changes=changes,
        noise_log=_spread(_residuals(calm, [c.index for c in cuts]), noise, len(cuts) + 1),
        false_alarm=false_alarm,
    )


def _slowdown(changes: Sequence[Change]) -> tuple[float, int | None]:
    """Returns the shift and the first run of the unbroken row of slowdowns at the end."""
    total, since = 0.0, None
    for change in reversed(changes):
        if change.shift <= 0:
            break
        total += math.log1p(change.shift)
        since = change.index
    return math.expm1(total), since


def _calmed(logs: Array, noise: float | None) -> Array:
    """Returns the values drawn to within _CLIP deviations of their neighbours' median."""
    bound = _CLIP * max(_of_steps(logs), noise or 0.0)
    middles = np.array(
        [np.median(logs[max(0, i - _WINDOW) : i + _WINDOW + 1]) for i in range(len(logs))]
    )
    return np.asarray(np.clip(logs, middles - bound, middles + bound))


def _of_steps(logs: Array) -> float:
    """Returns the noise as steps between neighbours show it, whatever the levels do."""
    steps = _NORMAL * float(np.median(np.abs(np.diff(logs)))) / math.sqrt(2)
    return max(steps, _LEAST_NOISE)


def _cuts(part: Array, offset: int, noise: float | None, level: float) -> list[int]:
    """Returns where the level of a part changes, in order, by binary segmentation."""
    n = len(part)
    if n < LEAST_RUNS:
        return []
    places = range(_LEAST_BEFORE, n - _LEAST_AFTER + 1)
    size, place = max((abs(_t_of_cut(part, k, noise)), k) for k in places)
    if len(places) * _two_sided(size, _dof(n - 2, noise)) > level:
        return []
    before = _cuts(part[:place], offset, noise, level)
    after = _cuts(part[place:], offset + place, noise, level)
    return [*before, offset + place, *after]


def _t_of_cut(part: Array, k: int, noise: float | None) -> float:
    """Returns Student's t of the two sides' means."""
    n = len(part)
    # Where a level lasted for a while only, one cut leaves the other change in the residuals.
    spread = min(_spread(_residuals(part, [k]), noise, 2), _of_steps(part))
    return float(part[k:].mean() - part[:k].mean()) / (spread * math.sqrt(1 / k + 1 / (n - k)))


def _sure(series: Array, cuts: Sequence[int], noise: float | None, level: float) -> list[Change]:
    """Returns the cuts that stand with the noise around all levels, its correlation counted.

    The least sure is given up first, and then the others are asked again.
    """
    cuts = list(cuts)
    while cuts:
        left = _residuals(series, cuts)
        spread = _spread(left, noise, len(cuts) + 1) * _correlated(left)
        dof = _dof(len(series) - len(cuts) - 1, noise)
        found = [
            _between(series, edges, spread, dof)
            for edges in zip([0, *cuts[:-1]], cuts, [*cuts[1:], len(series)], strict=True)
        ]
        least = max(found, key=lambda c: c.p_value)
        if least.p_value <= level:
            return found
        cuts.remove(least.index)
    return []


def _between(series: Array, edges: tuple[int, int, int], spread: float, dof: float) -> Change:
    """Returns the change at the middle one of three edges."""
    first, here, last = edges
    rise = float(series[here:last].mean() - series[first:here].mean())
    t = abs(rise) / (spread * math.sqrt(1 / (here - first) + 1 / (last - here)))
    p = min(1.0, len(series) * _two_sided(t, dof))
    return Change(index=here, shift=math.expm1(rise), p_value=p)


def _slope(part: Array, offset: int, noise: float | None, level: float) -> Change | None:
    """Returns the slope of a part, where it is one."""
    n = len(part)
    if n < LEAST_RUNS:
        return None
    x = np.arange(n) - (n - 1) / 2
    square = float((x**2).sum())
    rise = float((x * (part - part.mean())).sum()) / square
    left = part - part.mean() - rise * x
    spread = _spread(left, noise, 2) * _correlated(left)
    p = _two_sided(abs(rise) * math.sqrt(square) / spread, _dof(n - 2, noise))
    if p > level:
        return None
    return Change(index=offset + 1, shift=math.expm1(rise * (n - 1)), p_value=p, kind="slope")


def _residuals(part: Array, cuts: Sequence[int]) -> Array:
    pieces = np.split(part, list(cuts))
    return np.concatenate([p - p.mean() for p in pieces])


def _dof(own: float, noise: float | None) -> float:
    return own + (0.0 if noise is None else _NOISE_RUNS)


def _spread(left: Array, noise: float | None, means: int) -> float:
    """Returns the deviation of residuals of which `means` levels were taken out."""
    squares = float((left**2).sum()) + (0.0 if noise is None else _NOISE_RUNS * noise**2)
    return max(_LEAST_NOISE, math.sqrt(squares / max(1.0, _dof(len(left) - means, noise))))


def _correlated(left: Array) -> float:
    """Returns by what positive correlation of neighbours widens the noise of a mean.

    One that chance would often show (below two deviations, 2 / sqrt(n)) counts as none.
    """
    n, square = len(left), float((left**2).sum())
    if square == 0:
        return 1.0
    r = float((left[1:] * left[:-1]).sum()) / square
    if r < 2 / math.sqrt(n):
        return 1.0
    r = min(0.9, r)
    return math.sqrt((1 + r) / (1 - r))


def _two_sided(t: float, dof: float) -> float:
    """Returns P(|T| > t) of Student's t: Wallace's normal approximation (1959)."""
    z = (8 * dof + 1) / (8 * dof + 3) * math.sqrt(dof * math.log1p(t * t / dof))
    return math.erfc(z / math.sqrt(2))
