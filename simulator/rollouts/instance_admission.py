"""Who gets a slot of an engine on the event engine, and what is read in for it."""

from __future__ import annotations

import heapq

from flopwright.plan import rollout_choices as policy
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.attempt import Attempt, Queue
from flopwright.simulator.rollouts.decode import prefill_s
from flopwright.simulator.rollouts.instance_cache import Slots


class Admission(Slots):
    """The admitting side of one engine in a phase."""

    def admits(self, a: Attempt, own: bool) -> bool:
        """Whether an attempt may have a slot now."""
        rules, running = self.rules, len(self.admitted)
        here = a.place == policy.ON_GPU and a.home == self.index
        new = self.blocks(a.context)
        if here:
            new -= self.blocks(a.cached)
        elif self.samples.get(a.prompt, 0) == 0:
            new += rules.shared
        if rules.capacity >= st.NO_LIMIT and not rules.throttled:
            return running < rules.slots and (own or self.begun < rules.concurrency)
        growth = self.growth(1) + self.blocks(a.context + 1) - self.blocks(a.context)
        idle = self.idle_blocks(but=a if here else None)
        if not policy.fits(running, rules.slots, self.used, new, growth, idle, rules.capacity):
            return False
        if not own and self.begun >= rules.concurrency:
            return False
        return (
            not rules.throttled
            or here
            or policy.throttle_admits(
                running if own else self.active,
                self.limit,
                self.used - (idle if own else 0),
                new,
                rules.high,
            )
        )

    def admit(self, a: Attempt, now_s: float) -> None:
        """Gives an attempt a slot: its cache is loaded, what is missing is read."""
        rules, phase, self.noted_s = self.rules, self.phase, now_s
        here = a.place == policy.ON_GPU and a.home == self.index
        if here:
            self.idle.remove(a)
            self.release(a, a.cached)
        elif a.place == policy.ON_GPU:
            self.phase.instances[a.home].give_up(a)
        if rules.capacity < st.NO_LIMIT:
            self._evict_for(a)
        shared = self.samples.get(a.prompt, 0) > 0
        self.acquire(a, a.context)
        self.admitted.append(a)
        if a.place == policy.NOWHERE:
            a.cached = rules.shared * rules.block if shared else 0
        a.run = int(phase.state.turn_tokens[a.turn]) - a.turn_done
        if rules.chunk:
            a.run = min(a.run, rules.chunk)
        if rules.budget:
            a.run = min(a.run, rules.budget - a.spent)
        a.home = self.index
        phase.note(now_s, st.ADMIT, a, self)
        load_s = float(rules.load_s[a.place]) * a.cached
        if a.place in {policy.ON_HOST, policy.ON_NVME} and load_s > 0.0 and rules.prefetch:
            a.status = st.LOADING
            self.copy_free_s = max(self.copy_free_s, now_s) + load_s
            a.ready_s = self.copy_free_s
            phase.expect(a, a.ready_s)
            return
        if a.place in {policy.ON_HOST, policy.ON_NVME}:
            self.start_s += load_s
        self.read(a)

    def _evict_for(self, a: Attempt) -> None:
        """Evicts waiting caches until a newcomer fits, with the next step of all."""
        grow = self.growth(1) + self.blocks(a.context + 1) - self.blocks(a.context)
        while True:
            shared = self.samples.get(a.prompt, 0) > 0
            need = self.blocks(a.context) + (0 if shared else self.rules.shared)
            if self.used + need + grow <= self.rules.capacity:
                return
            self.evict(self.idle[0])

    def read(self, a: Attempt) -> None:
        """Starts the prefill of what the cache of an admitted attempt lacks."""
        rules = self.rules
        if a.place in {policy.ON_HOST, policy.ON_NVME}:
            self.phase.unstow(a)
            self.phase.counts["loaded_tokens"] += a.cached
        a.place = policy.ON_GPU
        a.pre_left, a.pre_at = a.context - a.cached, a.cached
        free = rules.prefill_fixed_s + rules.prefill_token_s + rules.prefill_pair_s <= 0.0
        if a.pre_left > 0 and not free:
            if rules.chunk_prefill:
                a.status = st.PREFILL
                self.lane.append(a)
                return
            seconds = prefill_s(rules.prefill_token_s, rules.prefill_pair_s, a.pre_left, a.pre_at)
            if not self.fixed_paid:
                seconds += rules.prefill_fixed_s
                self.fixed_paid = True
            self.start_s += seconds
            self.phase.counts["prefill_s"] += seconds
        self.join(a)

    def join(self, a: Attempt) -> None:
        """Lets an attempt decode from the next step on."""
        self.phase.counts["prefill_tokens"] += a.context - a.cached
        self.phase.counts["recomputed_tokens"] += max(0, a.seen - a.cached)
        a.seen = a.cached = a.context
        a.status, a.finish_step = st.RUNNING, self.step + a.run
        self.context += a.context
        heapq.heappush(self.decoding, (a.finish_step, a.row, a))

    def give_up(self, a: Attempt) -> None:
        """Hands the waiting cache of an attempt to another instance, through the pool."""
        self.idle.remove(a)
        self.release(a, a.cached)
        self.phase.stow(a)

    def fill(self, now_s: float) -> None:
        """Admits from the own queue, then from the one that attempts were dealt to."""
        while (a := self.own.head) is not None:
            if not self.admits(a, own=True):
                self.blocked = True  # who waits here goes before the shared queue
                return
            self.own.pop()
            self.admit(a, now_s)
        self.take(self.dealt, now_s)

    def take(self, line: Queue, now_s: float) -> None:
        """Admits from a queue while its head may have a slot."""
        while (a := line.head) is not None:
            if self.rules.chunk and line is self.phase.pool:
                others = [i for i in self.phase.instances if i is not self and not i.blocked]
                least = min((len(i.admitted) for i in others), default=len(self.admitted))
                if not policy.pulls(len(self.admitted), least):
                    return
            if not self.admits(a, own=False):
                self.blocked = True
                return
            line.pop()
            self.begun += 1
            self.admit(a, now_s)

    def returned(self, a: Attempt, now_s: float) -> None:
        """Takes an attempt back from its tool call."""
        self.phase.note(now_s, st.RETURN, a, self)
        if self.rules.budget and a.spent >= self.rules.budget:
            a.status = st.SPENT_UP
            self.begun -= 1
            return
        a.status = st.PARKED
        self.own.push(now_s, a)
        if len(self.admitted) < self.rules.slots:
            self.nudge(now_s)
