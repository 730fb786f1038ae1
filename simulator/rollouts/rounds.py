"""Rollout rounds in simulated time: generate, switch, update, switch back, synchronise.

One co-located loop: the same GPUs generate and train in turn. Attempts in flight are always
N * K; those that a round cuts off keep their tokens and go first in the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from flopwright.plan import rollout as policy
from flopwright.report.metrics import RoundMetrics
from flopwright.simulator.engine.engine import Hook
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.conservation import Ledger
from flopwright.simulator.rollouts.drivers import Driver, Kind, driver_for
from flopwright.simulator.rollouts.flight import Flight
from flopwright.simulator.rollouts.lengths import Floats, Ints
from flopwright.simulator.rollouts.record import PHASES, REWARD, RoundRecord, Versions
from flopwright.simulator.rollouts.report import (
    RoundReport,
    mean_spans,
    round_report,
    warmup_rounds,
)
from flopwright.simulator.rollouts.rewards import Judges
from flopwright.simulator.rollouts.state import PhaseResult
from flopwright.spec.rollout import RolloutScenario

Progress = Callable[[int, int], None]


class _Loop:
    """The state that lives from round to round."""

    def __init__(self, scenario: RolloutScenario, seed: int, driver: Driver, log: bool) -> None:
        self.scenario = scenario
        self.flight = Flight(scenario, seed)
        self.judges = Judges(scenario, seed)
        self.versions = Versions()
        self.driver = driver
        self.log = log
        self.now_s = 0.0

    def round(self, hook: Hook | None, ledger: Ledger | None) -> RoundRecord:
        """Runs one round."""
        flight, scenario = self.flight, self.scenario
        flight.fill()
        rows = flight.rows
        before = rows[:, st.TOKENS].copy()
        if ledger is not None:
            ledger.opened(flight)
        result = self.driver(flight.phase(), self.log)
        if ledger is not None:
            ledger.closed(flight, before, result)
        self.versions.add(rows[:, st.ID], flight.version, rows[:, st.TOKENS] - before)
        trained, _ = flight.dispatch()
        tokens = int(trained[:, st.TOTAL].sum()) + len(trained) * scenario.prompt_tokens
        reward_s = self._reward_s(result, trained)
        park_s = flight.caches()
        time_s = dict(
            zip(
                PHASES,
                (
                    result.end_s,
                    scenario.switch.to_update_s + park_s,
                    scenario.update.fixed_s + scenario.update.per_token_s * tokens,
                    scenario.switch.to_generation_s,
                    scenario.weight_sync.seconds,
                ),
                strict=True,
            )
        )
        if scenario.reward.kind != "none":
            time_s = {PHASES[0]: result.end_s, REWARD: reward_s, **time_s}
        if hook is not None:
            self._tell(hook, time_s)
        record = self._record(result, before, time_s, trained, tokens)
        dropped, lost = self._turn(sum(time_s.values()))
        return replace(record, dropped=dropped, dropped_tokens=lost)

    def _reward_s(self, result: PhaseResult, trained: Ints) -> float:
        rows, samples = self.flight.rows, self.scenario.samples_per_prompt
        done = rows[result.finish_row]
        return self.judges.wait_s(
            result.finish_s,
            done[:, st.TOTAL],
            done[:, st.ID] // samples,
            np.unique(trained[:, st.ID] // samples),
            result.end_s,
        )

    def _tell(self, hook: Hook, time_s: dict[str, float]) -> None:
        at_s = self.now_s
        for name, seconds in time_s.items():
            hook(name, at_s, at_s + seconds)
            at_s += seconds

    def _turn(self, elapsed_s: float) -> tuple[int, int]:
        """Lets the round pass, tools going on; returns attempts and tokens thrown away."""
        self.now_s += elapsed_s
        self.judges.pass_time(elapsed_s)
        return self.flight.turn_version(elapsed_s)

    def _record(
        self,
        result: PhaseResult,
        before: Ints,
        time_s: dict[str, float],
        trained: Ints,
        trained_tokens: int,
    ) -> RoundRecord:
        flight, scenario = self.flight, self.scenario
        rows, version = flight.rows, flight.version
        done = rows[:, st.STATUS] == st.DONE
        lengths, first = rows[done, st.TOTAL], rows[:, st.FIRST]
        metrics = self._metrics(result, before, time_s, version - first[done])
        by_version, by_tokens = self.versions.take(trained[:, st.ID])
        limit = scenario.staleness.max_versions
        masked = 0
        if scenario.staleness.rule == "mask" and limit is not None:
            masked = policy.masked_tokens(by_version, by_tokens, version, limit)
        kept = np.isin(rows[:, st.PLACE], (1, 2, 3)) & ~done
        return RoundRecord(
            metrics=metrics,
            finish_s=result.finish_s,
            lengths=lengths,
            lags=version - first[done],
            rounds_in_flight=version - rows[done, st.SUBMITTED] + 1,
            carried=int((first[~done] >= 0).sum()),
            off_policy_tokens=int(before[done].sum()),
            trained_tokens=trained_tokens,
            trained_lags=version - trained[:, st.FIRST],
            trained_token_lags=_histogram(version - by_version, by_tokens),
            masked_tokens=masked,
            at_budget=int((lengths >= scenario.effort.tokens).sum()) if scenario.effort else 0,
            verbose=int((lengths > scenario.verbosity.tokens).sum()) if scenario.verbosity else 0,
            parked_kv_tokens=int(rows[kept, st.CACHED].sum()),
            phase=result,
        )

    def _metrics(
        self, result: PhaseResult, before: Ints, time_s: dict[str, float], lags: Ints
    ) -> RoundMetrics:
        rows = self.flight.rows
        done = rows[:, st.STATUS] == st.DONE
        generated = int(rows[:, st.TOKENS].sum() - before.sum())
        values, counts = np.unique(lags, return_counts=True)
        round_s = sum(time_s.values())
        return RoundMetrics(
            round_time_s=round_s,
            time_s=time_s,
            tail_s=tail_s(result.finish_s, self.scenario.num_attempts, result.end_s),
            gpu_idle_share=idle_share(self.scenario, result.busy_s, result.end_s),
            tokens_per_s=generated / round_s if round_s > 0 else 0.0,
            completed=len(result.finish_s),
            generated_tokens=generated,
            kv_peak_tokens=int(result.kv_peak.max()) * self.flight.rules.block,
            parked_tokens=int(rows[~done, st.TOKENS].sum()),
            preemptions=result.preemptions,
            staleness=dict(zip(values.tolist(), counts.tolist(), strict=True)),
        )


def _histogram(values: Ints, weights: Ints) -> dict[int, int]:
    unique, index = np.unique(values, return_inverse=True)
    sums = np.zeros(len(unique), dtype=np.int64)
    np.add.at(sums, index, weights)
    return dict(zip(unique.tolist(), sums.tolist(), strict=True))


def tail_s(finish_s: Floats, num_attempts: int, generation_s: float) -> float:
    """Returns the seconds in which at most a tenth of the attempts of the round still ran."""
    begins = num_attempts - num_attempts // 10
    return generation_s - float(finish_s[begins - 1]) if len(finish_s) >= begins else 0.0


def idle_share(scenario: RolloutScenario, busy_s: Floats, generation_s: float) -> float:
    """Returns the share of slot-seconds of the generation phase that decoded nothing.

    Where slots are not limited, an instance has as many as it needs for its equal share of
    the attempts in flight.
    """
    share = -(-scenario.num_attempts // scenario.instances)
    slots = min(scenario.slots_per_instance or share, share)
    total = slots * scenario.instances * generation_s
    return min(1.0, max(0.0, 1.0 - float(busy_s.sum()) / total)) if total > 0 else 0.0


def simulate_rounds(
    scenario: RolloutScenario,
    rounds: int,
    seed: int,
    progress: Progress | None = None,
    hook: Hook | None = None,
    *,
    loop: Kind = "auto",
    log: bool = False,
    debug: bool = False,
) -> list[RoundRecord]:
    """Returns the first `rounds` rounds, warm-up included; same seed, same result.

    Args:
        hook: called with (phase, start_s, end_s) of every phase, since the loop began.
        loop: "simpy", the reference; "compiled", the same in machine code; "auto" chooses.
        log: keep every event of every round (`record.phase.log`).
        debug: check after every round that nothing was lost or counted twice.

    Raises:
        InputError: the rounds are big and nothing is there to compile them.
    """
    state = _Loop(scenario, seed, driver_for(scenario, rounds, loop), log)
    ledger = Ledger(scenario) if debug else None
    records: list[RoundRecord] = []
    for done in range(rounds):
        records.append(state.round(hook, ledger))
        if progress is not None:
            progress(done + 1, rounds)
    return records


def simulate(
    scenario: RolloutScenario,
    rounds: int | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
    *,
    loop: Kind = "auto",
) -> RoundReport:
    """Returns the report over steady-state rounds.

    Args:
        rounds: rounds kept, after a warm-up of at least five times the mean number of
            rounds an attempt spans; None takes the scenario's.
        seed: None takes the scenario's.
        progress: called with (rounds done, rounds in all), warm-up included.
        loop: as in `simulate_rounds`.
    """
    kept = rounds if rounds is not None else scenario.rounds
    used = seed if seed is not None else scenario.seed
    warm = warmup_rounds(1 / mean_spans(scenario))
    records = simulate_rounds(scenario, warm + kept, used, progress, loop=loop)
    return round_report(scenario, records[warm:], warmup=warm, seed=used)
