"""An experiment run by the simulator: its metrics by name, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.simulator.accuracy.rl.setup import cluster_from, engine_from
from flopwright.simulator.rollouts.engine.experiment import engine_metrics
from flopwright.simulator.rollouts.layouts import IterationReport, iteration
from flopwright.simulator.rollouts.layouts_generation import generate
from flopwright.simulator.rollouts.layouts_identity import queue_staleness
from flopwright.simulator.rollouts.layouts_lengths import GroupStream
from flopwright.simulator.rollouts.update import UpdateTimes, update_times
from flopwright.simulator.rollouts.weight_sync import SyncTime, sync_time
from flopwright.spec.rollouts.engine import EngineModel
from flopwright.spec.rollouts.engine_experiment import EngineExperiment
from flopwright.spec.rollouts.experiment import (
    Experiment,
    LoopExperiment,
    QueueExperiment,
    RanksExperiment,
    SyncExperiment,
)
from flopwright.spec.rollouts.layout import Fleet, LayoutInput, PhaseTimes

# Draws of a batch whose lengths the update phase is priced on.
_BATCHES: Final = 3


class Outcome:
    """The metrics of one experiment; `metric` makes what a name needs and no more."""

    def metric(self, name: str) -> float:
        """Returns a metric in SI units.

        Raises:
            InputError: the experiment has no such metric.
        """
        maker = getattr(type(self), f"_m_{name}", None)
        if maker is None:
            known = [n.removeprefix("_m_") for n in dir(type(self)) if n.startswith("_m_")]
            raise _no_metric(name, known)
        return float(maker(self))


class LoopOutcome(Outcome):
    """Metrics of an RL loop."""

    def __init__(self, given: LoopExperiment) -> None:
        self.given = given
        self.cluster = cluster_from(given.cluster)

    @cached_property
    def update(self) -> UpdateTimes | None:
        """The update phase, None where none was given."""
        if self.given.update is None:
            return None
        batch = self.given.batch
        stream = GroupStream(batch.lengths, batch.samples, self.given.seed)
        drawn = np.stack([stream.draw(batch.prompts) for _ in range(_BATCHES)])
        # the mean batch: all draws at once, each token counted a third
        tokens = (drawn + batch.prompt_tokens).ravel()
        phase = self.given.update
        many = phase.model_copy(update={"mini_batches": phase.mini_batches * _BATCHES})
        times = update_times(self.given.model, self.cluster, many, tokens)
        return UpdateTimes(
            update_s=times.update_s / _BATCHES,
            log_prob_s=times.log_prob_s / _BATCHES,
            load_s=times.load_s,
            tokens_per_s=times.tokens_per_s,
            sequence_tokens=times.sequence_tokens,
            assumptions=times.assumptions,
        )

    @cached_property
    def sync(self) -> SyncTime | None:
        """The synchronisation, None where none is counted."""
        return sync_time(self.given.sync, self.cluster) if self.given.sync is not None else None

    @property
    def _woken(self) -> bool:
        """Whether generation's time holds that of the synchronisation."""
        return self.given.sync_in == "generation"

    @cached_property
    def fleet(self) -> Fleet:
        """The engines."""
        rollout = self.given.rollout
        engine = engine_from(rollout.engine, self.given.model, self.cluster)
        each = engine.gpus if rollout.engine.numbers is not None else rollout.engine.shape.gpus
        return Fleet(
            engine=engine,
            instances=max(1, rollout.gpus // each),
            routing=rollout.routing,
            long_share=rollout.long_share,
            long_instances=rollout.long_instances,
            capture=rollout.capture,
            chunk_tokens=rollout.chunk_tokens,
            wake_s=f"{rollout.wake_s + (self._m_sync_time() if self._woken else 0.0)} s",
        )

    @cached_property
    def report(self) -> IterationReport:
        """The iteration."""
        update, sync = self.update, self.sync
        times = PhaseTimes(
            update_s=f"{update.update_s if update else 0.0} s",
            log_prob_s=f"{update.log_prob_s if update else 0.0} s",
            sync_s=f"{sync.sync_s if sync and not self._woken else 0.0} s",
            switch_s=f"{update.load_s if update else 0.0} s",
        )
        return iteration(
            LayoutInput(
                batch=self.given.batch,
                fleet=self.fleet,
                times=times,
                layout=self.given.layout,
                driver_s=f"{self.given.driver_s} s",
                seed=self.given.seed,
            )
        )

    def _phase(self, name: str) -> float:
        return self.report.time_s[name]

    def _m_update_time(self) -> float:
        return self.update.update_s if self.update else 0.0

    def _m_log_prob_time(self) -> float:
        return self.update.log_prob_s if self.update else 0.0

    def _m_sync_time(self) -> float:
        return self.sync.sync_s if self.sync else 0.0

    def _m_step_time(self) -> float:
        return self.report.step_s

    def _m_generation_time(self) -> float:
        return self.report.generation_s

    def _m_engine_time(self) -> float:
        return self.report.engine_s

    def _m_tail_time(self) -> float:
        return self.report.tail_s

    def _m_wait_time(self) -> float:
        return self._phase("generation")

    def _m_switch_time(self) -> float:
        return self._phase("switch")

    def _m_train_time(self) -> float:
        if self.given.steps is None:
            raise InputError(
                Violation(field="experiment.steps", rule="train_time needs the number of steps",
                          nearest_fix="add 'steps:'")
            )  # fmt: skip
        return self.report.step_s * self.given.steps

    def _m_tokens_per_s(self) -> float:
        return self.report.tokens_per_s

    def _m_rollout_tokens_per_s(self) -> float:
        return self.report.response_tokens / self.report.generation_s

    def _m_generation_share(self) -> float:
        return self._phase("generation") / self.report.step_s

    def _m_training_share(self) -> float:
        return (self._phase("update") + self._phase("log_prob")) / self.report.step_s

    def _m_sync_share(self) -> float:
        return (self._phase("sync") + self._phase("switch")) / self.report.step_s

    def _m_staleness(self) -> float:
        return self.report.staleness

    def _m_most_stale(self) -> float:
        return float(self.report.most_stale)

    def _m_preempted(self) -> float:
        return float(self.report.preempted)

    def _m_kv_share(self) -> float:
        capacity = self.fleet.engine.kv_capacity_tokens
        return self.report.mean_tokens / capacity if capacity else 0.0


class SyncOutcome(Outcome):
    """Metrics of one synchronisation."""

    def __init__(self, given: SyncExperiment) -> None:
        self.given = given
        self.time = sync_time(given.sync, cluster_from(given.cluster))

    def _m_sync_time(self) -> float:
        return self.time.sync_s

    def _m_wire_time(self) -> float:
        return self.time.lower_bound_s

    def _m_load_time(self) -> float:
        return self.time.load_s

    def _m_copy_time(self) -> float:
        return self.time.copy_s


class RanksOutcome(Outcome):
    """Times of ranks that each generate a batch of known totals."""

    def __init__(self, given: RanksExperiment) -> None:
        self.given = given
        engine = engine_from(given.engine, given.model, cluster_from(given.cluster))
        self.seconds = [self._rank(engine, i) for i in range(len(given.ranks))]

    def _rank(self, engine: EngineModel, index: int) -> float:
        rank = self.given.ranks[index]
        rest = max(0, rank.tokens - rank.longest)
        others = rank.responses - 1
        each = min(rank.longest, round(rest / others)) if others else 0
        lengths = np.array([[rank.longest, *[max(1, each)] * others]], dtype=np.int64)
        fleet = Fleet(engine=engine, instances=1)
        return generate(fleet, self.given.prompt_tokens, lengths).seconds

    def metric(self, name: str) -> float:
        """Returns the seconds of a rank, "rank_0" the first one."""
        digits = name.removeprefix("rank_")
        if not digits.isdigit() or int(digits) >= len(self.seconds):
            raise _no_metric(name, (f"rank_{i}" for i in range(len(self.seconds))))
        return self.seconds[int(digits)]


class QueueOutcome(Outcome):
    """Staleness of samples that wait in a queue before the trainer."""

    def __init__(self, given: QueueExperiment) -> None:
        self.given = given

    def _m_staleness(self) -> float:
        g = self.given
        return queue_staleness(g.concurrent, g.batch, g.queue, g.utilization, g.tail)


class EngineOutcome(Outcome):
    """Rates of an engine alone."""

    def __init__(self, given: EngineExperiment) -> None:
        self.metrics = engine_metrics(given)

    def metric(self, name: str) -> float:
        """Returns a rate of the experiment's case."""
        if name not in self.metrics:
            raise _no_metric(name, self.metrics)
        return self.metrics[name]


def _no_metric(name: str, known: Iterable[str]) -> InputError:
    return InputError(
        Violation(
            field="metric",
            value=name,
            rule="no metric of this experiment",
            nearest_fix=did_you_mean(name, known),
        )
    )


def outcome_of(experiment: Experiment) -> Outcome:
    """Returns the outcome of an experiment, nothing run yet but what is quick.

    Raises:
        InputError: an experiment that cannot be run.
    """
    match experiment:
        case LoopExperiment():
            return LoopOutcome(experiment)
        case SyncExperiment():
            return SyncOutcome(experiment)
        case RanksExperiment():
            return RanksOutcome(experiment)
        case QueueExperiment():
            return QueueOutcome(experiment)
        case EngineExperiment():
            return EngineOutcome(experiment)
