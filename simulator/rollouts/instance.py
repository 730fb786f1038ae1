"""One inference engine on the event engine: who decodes, who is read in, who waits.

At a boundary (the end of the step in which something happens) it lets go of what finished,
makes room for the next step, admits from its queues, and plans how many steps run until the
next boundary.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from typing import Any

import simpy

from flopwright.plan import rollout_choices as policy
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.attempt import Attempt
from flopwright.simulator.rollouts.decode import prefill_s, steps_within, stretch_s
from flopwright.simulator.rollouts.instance_admission import Admission
from flopwright.simulator.rollouts.verdicts import judge

Curve = tuple[float, float, int, int, float, float, float, int, int, int, float]


class Instance(Admission):
    """One engine in a phase."""

    def curve(self) -> Curve:
        """Returns what `stretch_s` asks for, but the steps."""
        rules, active = self.rules, len(self.decoding)
        single = self.lane[0] if self.batch == 1 else None
        ride = max(1, rules.chunk_prefill - active)
        return (
            float(rules.base_s[active]),
            float(rules.per_context_s[active]),
            active,
            self.context,
            rules.prefill_fixed_s,
            rules.prefill_token_s,
            rules.prefill_pair_s,
            ride,
            single.pre_left if single else 0,
            single.pre_at if single else 0,
            self.batch_s,
        )

    def plan(self) -> None:
        """Sets how many steps run until the next boundary, and when that is."""
        self.batch, self.batch_s, self.fixed_paid = 0, 0.0, False
        steps = self.decoding[0][0] - self.step if self.decoding else st.NO_LIMIT
        if self.lane:
            steps = min(steps, self._plan_lane())
        if not self.decoding and not self.lane:
            self.planned, self.next_s = 0, float("inf")
            return
        free = self.rules.capacity - self.used
        if self.growth(steps) > free:
            low, high = 0, steps
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self.growth(middle) <= free else (low, middle)
            steps = low
        assert steps >= 1
        self.planned, self.next_s = steps, self.start_s + stretch_s(*self.curve(), steps)

    def _plan_lane(self) -> int:
        """Chooses which prefills the next steps carry; returns the steps they take."""
        rules = self.rules
        ride = max(1, rules.chunk_prefill - len(self.decoding))
        first = self.lane[0]
        if first.pre_left >= ride:
            self.batch = 1
            return -(-first.pre_left // ride)
        left, self.batch_s = ride, rules.prefill_fixed_s
        for a in self.lane:
            if a.pre_left > left:
                break
            left -= a.pre_left
            self.batch += 1
            self.batch_s += prefill_s(
                rules.prefill_token_s, rules.prefill_pair_s, a.pre_left, a.pre_at
            )
        if self.batch == 1:
            self.batch_s = 0.0
        return 1

    def nudge(self, now_s: float) -> None:
        """Brings the next boundary forward to the first step that ends at or after `now_s`."""
        if now_s >= self.next_s or self.phase.over:
            return
        if self.next_s == float("inf"):
            self.planned, self.next_s = 0, max(now_s, self.start_s)
        else:
            within = steps_within(*self.curve(), self.start_s, now_s, self.planned)
            end_s = self.start_s + stretch_s(*self.curve(), within)
            steps = within if end_s >= now_s else within + 1
            if steps >= self.planned:
                return
            self.planned, self.next_s = steps, self.start_s + stretch_s(*self.curve(), steps)
        if self.process is not None and self.process is not self.phase.clock.active_process:
            self.process.interrupt()

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Lives from boundary to boundary."""
        clock = self.phase.clock
        while True:
            asleep = self.next_s == float("inf")
            alarm = clock.event() if asleep else clock.at(self.next_s, 2**40 + self.index)
            try:
                yield alarm
            except simpy.Interrupt:
                continue
            self.boundary(self.next_s)

    def boundary(self, now_s: float) -> None:
        """What happens at the end of a step."""
        phase = self.phase
        phase.last_s, self.noted_s = now_s, now_s
        phase.counts["events"] += 1
        self.advance(self.planned, now_s)
        self.blocked = False
        self.let_go(now_s)
        if phase.over:
            return
        for a in self.loaded:
            self.read(a)
        self.loaded.clear()
        self.blocked = not self.make_room()
        if not self.blocked:
            self.fill(now_s)
            if not self.own.heap and not self.rules.dealt:
                self.take(phase.pool, now_s)
        self.plan()
        phase.spread(self, now_s)

    def advance(self, steps: int, now_s: float) -> None:
        """Moves the present stretch on by so many steps."""
        self.busy_s += len(self.decoding) * (now_s - self.start_s)
        self.used += self.growth(steps)
        self.peak = max(self.peak, self.used)
        self.context += len(self.decoding) * steps
        ride = max(1, self.rules.chunk_prefill - len(self.decoding))
        self.step += steps
        joins: list[Attempt] = []
        if self.batch == 1:
            a = self.lane[0]
            read = min(a.pre_left, steps * ride)
            self.phase.counts["prefill_s"] += steps * self.rules.prefill_fixed_s + prefill_s(
                self.rules.prefill_token_s, self.rules.prefill_pair_s, read, a.pre_at
            )
            a.pre_left, a.pre_at = a.pre_left - read, a.pre_at + read
            joins = [a] if a.pre_left == 0 else []
        elif self.batch > 1 and steps:
            joins = self.lane[: self.batch]
            self.phase.counts["prefill_s"] += self.batch_s
        del self.lane[: len(joins)]
        for a in joins:
            self.join(a)
        self.batch, self.batch_s = 0, 0.0
        self.start_s, self.planned = now_s, 0

    def let_go(self, now_s: float) -> None:
        """Takes what has run its tokens out of its slot: complete, to a tool, or back in line."""
        phase, rules, done = self.phase, self.rules, []
        while self.decoding and self.decoding[0][0] == self.step:
            a = heapq.heappop(self.decoding)[2]
            self.settle(a)
            self.admitted.remove(a)
            if a.tokens == a.total:
                done.append(a)
                continue
            self.idle.append(a)
            if a.turn_done == phase.state.turn_tokens[a.turn]:
                phase.call(a, now_s)
                phase.note(now_s, st.CALL, a, self)
                if rules.drop_idle:
                    self.evict(a, pressed=False)
            elif rules.budget and a.spent >= rules.budget:
                a.status = st.SPENT_UP
                self.begun -= 1
                phase.note(now_s, st.SPEND, a, self)
            else:
                a.status = st.PARKED
                self.begun -= 1
                phase.enqueue(a)
                phase.note(now_s, st.CHUNK, a, self)
        for a in done:
            self.release(a, a.context)
            a.place, a.cached = policy.NOWHERE, 0
            self.begun -= 1
            if rules.throttled:
                line = self.dealt if rules.dealt else phase.pool
                queued = len(self.own.heap) + len(line.heap)
                self.limit = policy.limit_after_completion(
                    self.limit, rules.increase, queued, self.used, rules.low
                )
        if done and not rules.rewarded:
            phase.finish(done, now_s)
        for a in done:
            phase.note(now_s, st.FINISH, a, self)
            if rules.rewarded:
                judge(phase, a, now_s)

    def close(self, end_s: float) -> None:
        """Ends the phase here: whole steps until `end_s`, then everybody out of their slots."""
        if self.planned:
            steps = steps_within(*self.curve(), self.start_s, end_s, self.planned)
            cut_s = self.start_s + stretch_s(*self.curve(), steps)
            self.busy_s += len(self.decoding) * max(0.0, end_s - max(self.start_s, cut_s))
            self.advance(steps, min(cut_s, end_s) if self.start_s <= end_s else self.start_s)
            self.noted_s = end_s
            self.let_go(end_s)
        for a in list(self.admitted):
            was = a.status
            self.admitted.remove(a)
            if was == st.RUNNING:
                self.settle(a)
            if was == st.PREFILL:
                a.place, a.cached = policy.NOWHERE, 0
            a.status = st.PARKED if a.tokens > 0 else st.QUEUED
