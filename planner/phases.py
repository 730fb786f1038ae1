"""Plans every phase of a run: a search a phase, ramps priced batch by batch, restarts counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from flopwright.plan.learning_rate import learning_rate_at
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.phases import Phase, phases_of
from flopwright.plan.ramp import at_batch
from flopwright.planner.phases_result import BatchRun, PhasedRun, PhaseRun, RateSegment
from flopwright.planner.result import RankedPlan, SearchResult
from flopwright.planner.search import Progress, search
from flopwright.planner.whole_run import DAY_S, HOUR_S, WholeRun, whole_run
from flopwright.report.metrics import Interval, Prediction
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.predict import predict
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.parameters import num_params
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Workload
from flopwright.units import show_bytes, show_seconds

# Between two splits the run is stopped, saved, started and loaded: without a storage link the
# whole of it is assumed, with one all but the bytes.
RESTART_S: Final = 1200.0
START_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a run is planned with.

    Attributes:
        restart_s: time between two splits; None: `restart_seconds` says it.
        say: called with what is planned next; progress: with plans priced of it.
    """

    calibration: Calibration
    restart_s: float | None = None
    say: Callable[[str], None] = lambda text: None
    progress: Progress | None = None


def plan_phases(scenario: Scenario, means: Means) -> PhasedRun:
    """Returns every phase of the scenario planned, and what the whole run takes.

    Phases whose steps are alike share one search, and so their split.

    Raises:
        InputError: a phase has no legal plan: a ramp needs one that divides all its batches.
    """
    planner = _Planner(means=means)
    phases = tuple(planner.planned(phase) for phase in phases_of(scenario))
    return _totals(scenario, phases, means)


@dataclass(slots=True)
class _Planner:
    """The phases planned so far: one search for each kind of step, and the split in use."""

    means: Means
    searches: dict[str, tuple[str, SearchResult]] = field(default_factory=dict)
    before: ParallelPlan | None = None
    started: bool = False

    def planned(self, phase: Phase) -> PhaseRun:
        """Returns the phase with its plan and what it takes."""
        scenario, workload = phase.scenario, phase.scenario.workload
        name, result = self._search(phase)
        best = result.best
        rope = scenario.model.attention.rope
        scaling = None if rope is None else rope.scaling
        factor = "" if scaling is None else f"{scaling.kind}, factor {scaling.factor:g}"
        common = PhaseRun(
            name=phase.name,
            mixture=workload.mixture,
            seq_len=workload.seq_len,
            rope_scaling=factor or "none",
            total_tokens=workload.total_tokens,
            learning_rate=rate_segments(workload),
            searched_as=name,
            candidates=result.candidates if name == phase.name else 0,
        )
        if best is None:
            self.before, self.started = None, True
            return common.model_copy(update={"missing": _missing(result)})
        changes = self.started and best.plan != self.before
        restart_s = _restart_s(scenario, self.means) if changes else 0.0
        self.before, self.started = best.plan, True
        smaller = _smaller_batches(scenario, best.plan, self.means.calibration)
        update = {
            "plan": best,
            "run": whole_run(scenario, best.prediction, smaller),
            "batches": _batches(workload, best, smaller),
            "changes": changes,
            "restart_s": restart_s,
        }
        return common.model_copy(update=update)

    def _search(self, phase: Phase) -> tuple[str, SearchResult]:
        key = _step_key(phase.scenario)
        if key not in self.searches:
            self.means.say(f"planning phase {phase.name}")
            found = search(phase.scenario, self.means.calibration, 1, progress=self.means.progress)
            self.searches[key] = phase.name, found
        return self.searches[key]


def _step_key(scenario: Scenario) -> str:
    """Returns what tells one phase's search from another's: all but tokens, rate and data.

    The scaling of positions changes no shape and no operation.
    """
    workload, model = scenario.workload, scenario.model
    rope = model.attention.rope
    if rope is not None:
        plain = rope.model_copy(update={"scaling": None})
        attention = model.attention.model_copy(update={"rope": plain})
        model = model.model_copy(update={"attention": attention})
    step = workload.model_copy(
        update={"total_tokens": 0, "learning_rate": Workload.model_fields["learning_rate"].default}
        | {"mixture": None}
    )
    changes = {"name": "step", "model": model, "workload": step}
    return scenario.model_copy(update=changes).content_hash()


def _smaller_batches(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration
) -> dict[int, Prediction]:
    """Returns the prediction of a step of each batch below the full one."""
    full = scenario.workload.global_batch_size
    return {
        level.batch: predict(
            at_batch(scenario, level.batch), plan, calibration, whole_trace=False
        )[0]
        for level in scenario.workload.batch_levels
        if level.batch != full
    }


def _batches(
    workload: Workload, best: RankedPlan, smaller: dict[int, Prediction]
) -> tuple[BatchRun, ...]:
    return tuple(
        BatchRun(
            sequences=level.batch,
            microbatches=best.plan.num_microbatches(level.batch),
            steps=level.steps,
            step_time_s=smaller.get(level.batch, best.prediction).metrics.step_time_s,
        )
        for level in workload.batch_levels
    )


def rate_segments(workload: Workload) -> tuple[RateSegment, ...]:
    """Returns the learning rate's stretches in order, with the rates at their ends."""
    rate, steps = workload.learning_rate, workload.num_steps
    held = rate.warmup_steps
    if rate.kind == "constant":
        held = steps
    elif rate.hold_until_tokens is not None:
        held = max(held, workload.steps_within(rate.hold_until_tokens))
    decay = "linear" if rate.kind == "linear" else "cosine"
    bounds = (("warm-up", 0, rate.warmup_steps), ("hold", rate.warmup_steps, held))
    return tuple(
        RateSegment(
            kind=kind,
            steps=end - start,
            first=learning_rate_at(start, workload),
            last=learning_rate_at(end - 1, workload),
        )
        for kind, start, end in (*bounds, (decay, held, steps))
        if end > start
    )


def restart_seconds(scenario: Scenario) -> float:
    """Returns the assumed time to stop a run, save it, start it otherwise split and load it.

    Weights, master copy and optimizer state are written and read once over the shared storage.
    """
    storage = scenario.cluster.storage
    if storage is None:
        return RESTART_S
    return START_S + 2 * state_bytes(scenario) / (storage.bytes_per_s * scenario.cluster.num_gpus)


def state_bytes(scenario: Scenario) -> int:
    """Returns the bytes of a checkpoint that training can go on from."""
    precision, optimizer = scenario.workload.precision, scenario.workload.optimizer
    master = precision.master_weights
    weight = DTYPE_BYTES[precision.weights if master == "none" else master]
    states = optimizer.states_per_matrix_weight * DTYPE_BYTES[precision.optimizer_state]
    return num_params(scenario.model) * (weight + states)


def _restart_s(scenario: Scenario, means: Means) -> float:
    return restart_seconds(scenario) if means.restart_s is None else means.restart_s


def _missing(result: SearchResult) -> str:
    lacking = [p for p in result.infeasible if p.missing_bytes]
    if not lacking:
        return "no plan fits: host memory is missing"
    nearest = min(lacking, key=lambda p: p.missing_bytes)
    return (
        f"no plan fits: the nearest ({nearest.plan.label()}) lacks "
        f"{show_bytes(nearest.missing_bytes)} on stage {nearest.stage}"
    )


def _totals(scenario: Scenario, phases: tuple[PhaseRun, ...], means: Means) -> PhasedRun:
    runs = [phase.run for phase in phases if phase.run is not None]
    restarts_s = sum(phase.restart_s for phase in phases)
    assumed = _assumptions(scenario, phases, runs, means)
    if len(runs) < len(phases):
        return PhasedRun(
            scenario=scenario.name, phases=phases, restarts_s=restarts_s, assumptions=assumed
        )
    waiting_h = sum(
        phase.restart_s * run.gpus / HOUR_S for phase, run in zip(phases, runs, strict=True)
    )
    waiting_days, price = restarts_s / DAY_S, scenario.cluster.price_usd_per_gpu_h
    gpu_hours = sum(run.gpu_hours for run in runs) + waiting_h
    kwh = [run.kwh for run in runs if run.kwh is not None]
    return PhasedRun(
        scenario=scenario.name,
        phases=phases,
        steps=sum(run.steps for run in runs),
        tokens=sum(run.tokens for run in runs),
        days=sum(run.days for run in runs) + waiting_days,
        days_interval=Interval(
            low=sum(run.days_interval.low for run in runs) + waiting_days,
            high=sum(run.days_interval.high for run in runs) + waiting_days,
            probability=runs[0].days_interval.probability,
        ),
        gpu_hours=gpu_hours,
        usd=None if price is None else price * gpu_hours,
        kwh=sum(kwh) if len(kwh) == len(runs) else None,
        restarts_s=restarts_s,
        assumptions=assumed,
    )


def _assumptions(
    scenario: Scenario, phases: tuple[PhaseRun, ...], runs: list[WholeRun], means: Means
) -> tuple[str, ...]:
    texts = list(dict.fromkeys(text for run in runs for text in run.assumptions))
    if len(phases) > 1:
        texts.append(_restart_text(scenario, means))
        texts.append(
            "the ends of the phases' intervals are added: what slows one phase slows them all"
        )
    return tuple(texts)


def _restart_text(scenario: Scenario, means: Means) -> str:
    seconds = show_seconds(_restart_s(scenario, means))
    start = f"between two phases of different splits {seconds} to save, stop, start and load"
    if means.restart_s is not None:
        return f"{start}, as asked"
    storage = scenario.cluster.storage
    if storage is None:
        return f"{start}: assumed, the cluster names no storage"
    return (
        f"{start}: {show_seconds(START_S)} assumed, and {show_bytes(state_bytes(scenario))} "
        f"written and read once over {storage.name}"
    )
