"""Rollout rounds in simulated time: generate, switch, update, switch back, synchronise.

One co-located loop: the same GPUs generate and train in turn. Attempts in flight are always
N * K; those that a round cuts off keep their tokens and go first in the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import simpy

from flopwright.plan import rollout as policy
from flopwright.report.metrics import RoundMetrics
from flopwright.simulator.engine.engine import Engine, Hook
from flopwright.simulator.rollouts.generation import Instance, Phase, generate
from flopwright.simulator.rollouts.lengths import Floats, Ints, LengthStream
from flopwright.simulator.rollouts.record import PHASES, RoundRecord
from flopwright.simulator.rollouts.report import RoundReport, round_report, warmup_rounds
from flopwright.spec.rollout import RolloutScenario

Progress = Callable[[int, int], None]


class _Loop:
    """The state that lives from round to round."""

    def __init__(self, scenario: RolloutScenario, seed: int, hook: Hook | None) -> None:
        self.scenario = scenario
        self.engine = Engine(hook)
        self.stream = LengthStream(scenario.lengths, seed)
        self.needed = policy.stop_count(scenario.num_attempts, scenario.stop_fraction)
        self.attempts = np.zeros(0, dtype=policy.ATTEMPT)
        self.lengths = np.zeros(0, dtype=np.int64)
        self.next_id = 0
        self.version = 0
        # complete attempts whose prompt is not complete: they wait for their siblings
        self.pending = np.zeros(0, dtype=policy.ATTEMPT)

    def fill(self) -> None:
        """Drops what was counted and brings the attempts in flight back to N * K."""
        kept = self.attempts["status"] != policy.DONE
        count = self.scenario.num_attempts - int(kept.sum())
        fresh = policy.new_attempts(
            self.next_id, count, self.scenario.samples_per_prompt, self.version
        )
        self.attempts = np.concatenate([self.attempts[kept], fresh])
        self.lengths = np.concatenate([self.lengths[kept], self.stream.draw(count)])
        self.next_id += count

    def dispatch(self) -> policy.Attempts:
        """Returns the attempts of the prompts that are complete now; the others wait."""
        done = self.attempts[self.attempts["status"] == policy.DONE]
        pending = np.concatenate([self.pending, done])
        ready = policy.dispatch(pending["prompt"], self.scenario.samples_per_prompt)
        chosen = np.isin(pending["prompt"], ready)
        self.pending = pending[~chosen]
        return pending[chosen]

    def round(self) -> Generator[simpy.Event, Any, RoundRecord]:
        """Runs one round."""
        engine, scenario = self.engine, self.scenario
        self.fill()
        before = self.attempts["tokens"].copy()
        phase = Phase(
            engine=engine,
            scenario=scenario,
            attempts=self.attempts,
            lengths=self.lengths,
            version=self.version,
            needed=self.needed,
            stop=engine.event(),
            start_s=engine.now_s,
        )
        instances = yield from generate(phase)
        generation_s = engine.now_s - phase.start_s
        engine.record(PHASES[0], phase.start_s)
        trained = self.dispatch()
        tokens = int(trained["tokens"].sum()) + len(trained) * scenario.prompt_tokens
        update_s = scenario.update.fixed_s + scenario.update.per_token_s * tokens
        time_s = (
            generation_s,
            scenario.switch.to_update_s,
            update_s,
            scenario.switch.to_generation_s,
            scenario.weight_sync.seconds,
        )
        for name, pause_s in zip(PHASES[1:], time_s[1:], strict=True):
            begin_s = engine.now_s
            yield engine.wait(pause_s)
            engine.record(name, begin_s)
        record = self._record(phase, instances, before, time_s, trained, tokens)
        self.version += 1
        return record

    def _record(
        self,
        phase: Phase,
        instances: list[Instance],
        before: Ints,
        time_s: tuple[float, ...],
        trained: policy.Attempts,
        trained_tokens: int,
    ) -> RoundRecord:
        done = self.attempts["status"] == policy.DONE
        finish_s = np.array(phase.finish_s)
        lags = self.version - self.attempts["first"][done]
        generated = int(self.attempts["tokens"].sum() - before.sum())
        parked = int(self.attempts["tokens"][~done].sum())
        assert int(done.sum()) == len(finish_s)
        assert int(before.sum()) + generated == int(self.lengths[done].sum()) + parked
        values, counts = np.unique(lags, return_counts=True)
        round_s = sum(time_s)
        metrics = RoundMetrics(
            round_time_s=round_s,
            time_s=dict(zip(PHASES, time_s, strict=True)),
            tail_s=tail_s(finish_s, self.scenario.num_attempts, time_s[0]),
            gpu_idle_share=idle_share(self.scenario, instances, time_s[0]),
            tokens_per_s=generated / round_s if round_s > 0 else 0.0,
            completed=len(finish_s),
            generated_tokens=generated,
            kv_peak_tokens=max(i.kv_peak_tokens for i in instances),
            parked_tokens=parked,
            staleness=dict(zip(values.tolist(), counts.tolist(), strict=True)),
        )
        return RoundRecord(
            metrics=metrics,
            finish_s=finish_s,
            lengths=self.lengths[done],
            lags=lags,
            rounds_in_flight=self.version - self.attempts["submitted"][done] + 1,
            carried=int((self.attempts["first"][~done] >= 0).sum()),
            off_policy_tokens=int(before[done].sum()),
            trained_tokens=trained_tokens,
            trained_lags=self.version - trained["first"],
        )


def tail_s(finish_s: Floats, num_attempts: int, generation_s: float) -> float:
    """Returns the seconds in which at most a tenth of the attempts of the round still ran."""
    begins = num_attempts - num_attempts // 10
    return generation_s - float(finish_s[begins - 1]) if len(finish_s) >= begins else 0.0


def idle_share(scenario: RolloutScenario, instances: list[Instance], generation_s: float) -> float:
    """Returns the share of slot-seconds of the generation phase that decoded nothing.

    Where slots are not limited, an instance has as many as it needs for its equal share of
    the attempts in flight.
    """
    share = -(-scenario.num_attempts // scenario.instances)
    slots = min(scenario.slots_per_instance or share, share)
    total = slots * scenario.instances * generation_s
    busy = sum(i.busy_s for i in instances)
    return min(1.0, max(0.0, 1.0 - busy / total)) if total > 0 else 0.0


def simulate_rounds(
    scenario: RolloutScenario,
    rounds: int,
    seed: int,
    progress: Progress | None = None,
    hook: Hook | None = None,
) -> list[RoundRecord]:
    """Returns the first `rounds` rounds, warm-up included; same seed, same result.

    Args:
        hook: called with (phase, start_s, end_s) of every phase, since the loop began.
    """
    loop = _Loop(scenario, seed, hook)
    records: list[RoundRecord] = []

    def run() -> Generator[simpy.Event, Any, None]:
        for done in range(rounds):
            record = yield from loop.round()
            records.append(record)
            if progress is not None:
                progress(done + 1, rounds)

    loop.engine.start(run())
    loop.engine.run()
    return records


def simulate(
    scenario: RolloutScenario,
    rounds: int | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> RoundReport:
    """Returns the report over steady-state rounds.

    Args:
        rounds: rounds kept, after a warm-up of at least five times the mean number of
            rounds an attempt spans; None takes the scenario's.
        seed: None takes the scenario's.
        progress: called with (rounds done, rounds in all), warm-up included.
    """
    kept = rounds if rounds is not None else scenario.rounds
    used = seed if seed is not None else scenario.seed
    warm = warmup_rounds(scenario.stop_fraction)
    records = simulate_rounds(scenario, warm + kept, used, progress)
    return round_report(scenario, records[warm:], warmup=warm, seed=used)
