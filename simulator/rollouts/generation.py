"""One generation phase on the event engine: instances decode until the round policy ends it.

Each instance is one SimPy process that sleeps from completion to completion; the number of
events is the number of completions, whatever their length.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from flopwright.plan import rollout as policy
from flopwright.simulator.engine.engine import Engine, Process
from flopwright.simulator.rollouts.decode import steps_time_s, whole_steps
from flopwright.simulator.rollouts.lengths import Ints
from flopwright.spec.rollout import RolloutScenario


@dataclass(slots=True)
class Phase:
    """The shared state of one generation phase.

    Attributes:
        attempts: rows of plan.rollout.ATTEMPT, by age; written in place.
        lengths: tokens each row will have when complete; the policy never sees them.
        needed: completions that end the phase.
        waiting: rows without a slot, in admission order.
        finish_s: time of each completion since the phase began, in order.
        stop: fires when the policy says that the round is over.
    """

    engine: Engine
    scenario: RolloutScenario
    attempts: policy.Attempts
    lengths: Ints
    version: int
    needed: int
    stop: simpy.Event
    start_s: float
    waiting: deque[int] = field(default_factory=deque)
    finish_s: list[float] = field(default_factory=list)
    over: bool = False
    # single rows are touched at every completion: columns and a list are quick at that
    status: Any = field(init=False)
    tokens: Any = field(init=False)
    first: Any = field(init=False)
    total: list[int] = field(init=False)
    strict: bool = field(init=False)

    def __post_init__(self) -> None:
        self.status = self.attempts["status"]
        self.tokens = self.attempts["tokens"]
        self.first = self.attempts["first"]
        self.total = self.lengths.tolist()
        self.strict = self.scenario.ties == "strict"

    def finish(self, rows: list[int]) -> None:
        """Counts rows that finished in one step, oldest first; ends the phase if that was it."""
        done = len(self.finish_s)
        counted = policy.count_completions(len(rows), done, self.needed, self.strict)
        for place, row in enumerate(rows):
            self.tokens[row] = self.total[row]
            self.status[row] = policy.DONE if place < counted else policy.FINISHED
        self.finish_s.extend([self.engine.now_s - self.start_s] * counted)
        if not self.over and policy.round_over(len(self.finish_s), self.needed):
            self.over = True
            self.stop.succeed()


class Instance:
    """One inference engine: a set of active attempts that advance a token a step together."""

    def __init__(self, phase: Phase, slots: int) -> None:
        self.phase = phase
        self.slots = slots
        self.busy_s = 0.0  # slot-seconds in which a slot decoded
        self.kv_peak_tokens = 0
        self._active: list[tuple[int, int]] = []  # heap of (step at which it finishes, row)
        self._step = 0
        self._context = 0

    def admit(self, row: int) -> None:
        """Gives a row a slot; it decodes from the next step on."""
        phase = self.phase
        tokens = int(phase.tokens[row])
        phase.status[row] = policy.RUNNING
        if phase.first[row] < 0:
            phase.first[row] = phase.version
        heapq.heappush(self._active, (self._step + phase.total[row] - tokens, row))
        self._context += phase.scenario.prompt_tokens + tokens
        self.kv_peak_tokens = max(self.kv_peak_tokens, self._context)

    def run(self) -> Process:
        """Decodes until nothing is left or the phase ends."""
        engine, decode = self.phase.engine, self.phase.scenario.decode
        while self._active and not self.phase.over:
            since, steps = engine.now_s, self._active[0][0] - self._step
            pause_s = steps_time_s(decode, len(self._active), self._context, steps)
            try:
                yield engine.wait(pause_s)
            except simpy.Interrupt:
                pause_s = engine.now_s - since
                # A step that the end of the round cuts off leaves no token.
                steps = whole_steps(decode, len(self._active), self._context, pause_s, steps)
            self.busy_s += len(self._active) * pause_s
            self._step += steps
            self._context += len(self._active) * steps
            self.kv_peak_tokens = max(self.kv_peak_tokens, self._context)
            self._complete()

    def _complete(self) -> None:
        rows = []
        while self._active and self._active[0][0] == self._step:
            rows.append(heapq.heappop(self._active)[1])
        if not rows:
            return
        prompt = self.phase.scenario.prompt_tokens
        self._context -= sum(self.phase.total[row] + prompt for row in rows)
        self.phase.finish(rows)
        if not self.phase.over:
            waiting = self.phase.waiting
            for _ in range(policy.admit_count(len(waiting), self.slots - len(self._active))):
                self.admit(waiting.popleft())

    def cut(self) -> None:
        """Writes back the tokens of what the end of the round cut off."""
        for finish, row in self._active:
            self.phase.tokens[row] = self.phase.total[row] - (finish - self._step)


def generate(phase: Phase) -> Generator[simpy.Event, Any, list[Instance]]:
    """Runs one generation phase; returns its instances with what they counted.

    At its end every row of `phase.attempts` is DONE, FINISHED (surplus of a strict tie),
    PARKED or QUEUED.
    """
    scenario, engine = phase.scenario, phase.engine
    slots = scenario.slots_per_instance or len(phase.attempts)
    surplus = np.flatnonzero(phase.attempts["status"] == policy.FINISHED)
    if len(surplus):
        phase.finish(surplus.tolist())
    instances = [Instance(phase, slots) for _ in range(scenario.instances)]
    if not phase.over:
        order = policy.admission_order(phase.attempts)
        where = policy.place(len(order), np.full(scenario.instances, slots, dtype=np.int64))
        for row, index in zip(order[: len(where)].tolist(), where.tolist(), strict=True):
            instances[index].admit(row)
        phase.waiting.extend(order[len(where) :].tolist())
        processes = [engine.start(instance.run()) for instance in instances]
        yield phase.stop
        for process in processes:
            if process.is_alive:
                process.interrupt("round over")
        yield engine.all_of([*processes])
    for instance in instances:
        instance.cut()
    policy.park(phase.attempts)
    return instances
