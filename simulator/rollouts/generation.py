"""One generation phase on the event engine: the reference, in objects.

Every instance is a SimPy process that sleeps until its next boundary: the end of the step in
which something of its own happens. A tool call and a load from the host are events of an
attempt. At one time attempts come before instances, each by number, so that the order of
events is a rule and not an accident; the compiled loop has the same one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from flopwright.plan import rollout_choices as policy
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.attempt import Attempt, Queue
from flopwright.simulator.rollouts.clock import Clock
from flopwright.simulator.rollouts.instance import Instance
from flopwright.simulator.rollouts.instance_cache import Slots
from flopwright.simulator.rollouts.state import EventLog, PhaseResult, PhaseState
from flopwright.simulator.rollouts.verdicts import last_verdicts

_BY_INSTANCE: Final = 2**40  # behind every attempt in the order of events at one time
_AWAITED: Final = frozenset((st.TOOL, st.LOADING, st.JUDGED))


@dataclass(slots=True)
class Phase:
    """The shared part of a phase: queue, completions, tools, log."""

    state: PhaseState
    clock: Clock = field(default_factory=Clock)
    attempts: list[Attempt] = field(default_factory=list)
    instances: list[Instance] = field(default_factory=list)
    pool: Queue = field(default_factory=lambda: Queue())
    finish_s: list[float] = field(default_factory=list)
    finish_row: list[int] = field(default_factory=list)
    completed: int = 0
    overdue: int = 0
    over: bool = False
    last_s: float = 0.0
    servers: list[float] = field(default_factory=list)
    judges: list[float] = field(default_factory=list)
    host_used: int = 0
    host_peak: int = 0
    nvme_used: int = 0
    counts: dict[str, Any] = field(default_factory=dict)
    log: list[tuple[float, int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.overdue = int(self.state.rows[:, st.MUST].sum())
        self.servers = self.state.servers.tolist()
        self.judges = self.state.judges.tolist()
        self.counts = dict.fromkeys(
            ("preemptions", "evictions", "prefill_tokens", "recomputed_tokens", "loaded_tokens",
             "tool_calls", "decoded_tokens", "events"), 0,
        ) | {"prefill_s": 0.0, "tool_wait_s": 0.0}  # fmt: skip
        self.attempts = [Attempt.read(self.state, row) for row in range(len(self.state.rows))]
        self.instances = [Instance(self, i) for i in range(self.state.rules.instances)]

    # ---- queue ---------------------------------------------------------------------------

    def key(self, a: Attempt) -> float:
        """Returns where an attempt stands in the queue."""
        seen = int(self.state.seen[a.prompt])
        return policy.queue_key(
            self.state.rules.order, a.tokens > 0, a.tokens, a.estimate, self.is_probe(a), seen
        )

    def is_probe(self, a: Attempt) -> bool:
        """Whether it is the oldest sample in flight of its prompt."""
        return a.row == 0 or self.attempts[a.row - 1].prompt != a.prompt

    def enqueue(self, a: Attempt) -> None:
        """Puts an attempt into the queue that it is taken from."""
        rules = self.state.rules
        line = self.instances[int(self.state.dealt[a.row])].dealt if rules.dealt else self.pool
        line.push(self.key(a), a)

    def rekey(self) -> None:
        """Orders the queues anew: what was seen of a prompt has changed."""
        for line in (self.pool, *(i.dealt for i in self.instances)):
            waiting = [entry[2] for entry in line.heap]
            line.heap.clear()
            for a in waiting:
                line.push(self.key(a), a)

    # ---- completions ---------------------------------------------------------------------

    def finish(self, done: list[Attempt], now_s: float) -> None:
        """Counts attempts that finished in one step, oldest first; may end the phase."""
        state = self.state
        for a in done:
            counted = policy.counts_now(state.rules.strict, self.over)
            a.status = st.DONE if counted else st.FINISHED
            state.seen[a.prompt] = max(state.seen[a.prompt], a.total)
            if counted:
                self.finish_s.append(now_s)
                self.finish_row.append(a.row)
                self.overdue -= a.must
                a.must = 0
                state.left[a.prompt] -= 1
                whole = state.left[a.prompt] == 0
                self.completed += int(whole) if state.rules.groups else 1
                if policy.round_over(self.completed, state.needed, self.overdue):
                    self.over = True
        if state.rules.order == policy.PROBE:
            self.rekey()

    # ---- tools ---------------------------------------------------------------------------

    def call(self, a: Attempt, now_s: float) -> None:
        """Starts the tool call after the turn that just ended."""
        seconds = float(self.state.turn_s[a.turn])
        begin_s = now_s
        if self.servers:
            begin_s = max(now_s, self.servers[0])
            heapq.heapreplace(self.servers, begin_s + seconds)
        a.ready_s = begin_s + seconds
        a.context += int(self.state.turn_read[a.turn])
        a.turn, a.turn_done, a.status = a.turn + 1, 0, st.TOOL
        self.counts["tool_calls"] += 1
        self.counts["tool_wait_s"] += begin_s - now_s
        self.expect(a, a.ready_s)

    def expect(self, a: Attempt, time_s: float) -> None:
        """Makes something happen to an attempt at a time: an answer, a load, a verdict."""
        a.ready_s = time_s
        event = self.clock.at(time_s, 1 + a.row)
        event.callbacks.append(lambda _: self._happens(a, time_s))

    def _happens(self, a: Attempt, time_s: float) -> None:
        if self.over or a.ready_s != time_s or a.status not in _AWAITED:
            return
        self.last_s = time_s
        self.counts["events"] += 1
        if a.status == st.JUDGED:
            self.note(time_s, st.VERDICT, a, None)
            self.finish([a], time_s)
            return
        home = self.instances[a.home]
        if a.status == st.LOADING:
            home.loaded.append(a)
            self.note(time_s, st.LOADED, a, home)
            home.nudge(time_s)
        else:
            home.returned(a, time_s)

    # ---- caches off the GPU --------------------------------------------------------------

    def stow(self, a: Attempt) -> None:
        """Takes a cache that leaves its GPU into the pool, if that has room."""
        rules = self.state.rules
        total = rules.instances
        where = policy.cache_goes(
            a.cached,
            rules.host_tokens * total - self.host_used,
            rules.nvme_tokens * total - self.nvme_used,
        )
        a.place = where
        if where == policy.ON_HOST:
            self.host_used += a.cached
            self.host_peak = max(self.host_peak, self.host_used)
        elif where == policy.ON_NVME:
            self.nvme_used += a.cached
        else:
            a.cached = 0

    def unstow(self, a: Attempt) -> None:
        """Frees the room of a cache in the pool."""
        if a.place == policy.ON_HOST:
            self.host_used -= a.cached
        elif a.place == policy.ON_NVME:
            self.nvme_used -= a.cached

    # ---- the run -------------------------------------------------------------------------

    def note(self, time_s: float, kind: int, a: Attempt | None, where: Slots | None) -> None:
        """Writes an entry of the log."""
        row = -1 if a is None else int(self.state.rows[a.row, st.ID])
        block = self.state.rules.block
        used = 0 if where is None else where.used * block
        self.log.append((time_s, kind, row, -1 if where is None else where.index, used))

    def begin(self) -> None:
        """Puts every attempt where it stands at the start, and fills the instances."""
        surplus = [a for a in self.attempts if a.status == st.FINISHED]
        for a in self.attempts:
            if a.place == policy.ON_HOST:
                self.host_used += a.cached
            elif a.place == policy.ON_NVME:
                self.nvme_used += a.cached
            elif a.place == policy.ON_GPU:
                self.instances[a.home].settle_in(a)
        self.host_peak = self.host_used
        self.finish(surplus, 0.0)
        for a in surplus:
            self.note(0.0, st.FINISH, a, None)
        if self.over:
            return
        for a in self.attempts:
            if a.status == st.TOOL:
                self.instances[a.home].begun += 1
                self.expect(a, max(a.ready_s, 0.0))
            elif a.status == st.JUDGED and a.ready_s < np.inf:
                self.expect(a, max(a.ready_s, 0.0))
            elif a.status in {st.QUEUED, st.PARKED}:
                if a.place == policy.ON_GPU:
                    self.instances[a.home].begun += 1
                    self.instances[a.home].own.push(-1.0, a)
                else:
                    self.enqueue(a)
        for instance in self.instances:
            instance.fill(0.0)
        self.share_out()
        for instance in self.instances:
            instance.plan()

    def share_out(self) -> None:
        """Gives the shared queue, from its head, to the emptiest instances that admit it."""
        while (a := self.pool.head) is not None:
            open_ = [not i.own.heap and i.admits(a, own=False) for i in self.instances]
            best = policy.least_loaded([len(i.admitted) for i in self.instances], open_)
            if best < 0:
                return
            self.pool.pop()
            self.instances[best].begun += 1
            self.instances[best].admit(a, 0.0)

    def spread(self, source: Instance, now_s: float) -> None:
        """Wakes the emptiest other instance for what the queue holds (divided rollout)."""
        if self.pool.heap and self.state.rules.chunk:
            others = [i is not source and not i.blocked for i in self.instances]
            best = policy.least_loaded([len(i.admitted) for i in self.instances], others)
            if best >= 0:
                self.instances[best].nudge(now_s)

    def close(self, end_s: float) -> None:
        """Stops every instance at the end: whole steps count, a step cut off leaves no token."""
        for instance in self.instances:
            instance.close(end_s)
        self.note(end_s, st.END, None, None)


def generate(state: PhaseState, log: bool = False) -> PhaseResult:
    """Runs one generation phase; writes back what became of every attempt.

    At its end every row is DONE, FINISHED (surplus of a strict tie), TOOL, PARKED or QUEUED.
    """
    phase = Phase(state)
    phase.begin()
    if not phase.over:
        for instance in phase.instances:
            instance.process = phase.clock.process(instance.run())
        at_s, still = -1.0, 0
        most = 1000 * (len(phase.instances) + len(phase.attempts))
        while not phase.over and (next_s := phase.clock.peek()) < np.inf:
            if next_s > state.deadline_s:
                break
            at_s, still = (next_s, 0) if next_s > at_s else (at_s, still + 1)
            assert still <= most, "a phase stands still"
            phase.clock.step()
    timed = not phase.over and state.deadline_s < np.inf
    end_s = state.deadline_s if timed else phase.last_s
    assert phase.over or timed or state.rules.budget, "a phase stalled"
    last_verdicts(phase, end_s)
    phase.close(end_s)
    for a in phase.attempts:
        a.status = st.PARKED if a.status == st.SPENT_UP else a.status
        a.write(state)
    state.servers[:] = sorted(phase.servers)
    state.judges[:] = sorted(phase.judges)
    state.limits[:] = [i.limit for i in phase.instances]
    return _result(phase, end_s, log)


def _result(phase: Phase, end_s: float, log: bool) -> PhaseResult:
    columns = np.array(phase.log, dtype=np.float64).reshape(-1, 5)
    entries = EventLog(
        time_s=columns[:, 0],
        kind=columns[:, 1].astype(np.int64),
        attempt=columns[:, 2].astype(np.int64),
        instance=columns[:, 3].astype(np.int64),
        kv_tokens=columns[:, 4].astype(np.int64),
    )
    return PhaseResult(
        end_s=end_s,
        finish_s=np.array(phase.finish_s, dtype=np.float64),
        finish_row=np.array(phase.finish_row, dtype=np.int64),
        busy_s=np.array([i.busy_s for i in phase.instances]),
        kv_peak=np.array([i.peak for i in phase.instances]),
        host_peak=phase.host_peak,
        log=entries if log else None,
        **phase.counts,
    )
