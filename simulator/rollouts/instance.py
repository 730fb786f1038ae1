"""One inference engine on the event engine: who decodes, who is read in, who waits, and the cache.

At a boundary (the end of the step in which something happens) it lets go of what finished,
makes room for the next step, admits from its queues, and plans how many steps run until the
next boundary. The cache is counted in blocks, exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import simpy

from flopwright.plan import rollout_choices as policy
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.decode import prefill_s, steps_within, stretch_s
from flopwright.simulator.rollouts.state import PhaseState

if TYPE_CHECKING:
    from flopwright.simulator.rollouts.generation import Phase


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt; the columns of the state that it is read from have the same names."""

    row: int
    prompt: int
    status: int
    tokens: int
    total: int
    context: int
    seen: int
    turn: int
    turn_end: int
    turn_done: int
    spent: int
    home: int
    place: int
    cached: int
    first: int
    must: int
    ready_s: float
    estimate: float
    run: int = 0
    finish_step: int = 0
    pre_left: int = 0
    pre_at: int = 0

    _COLUMNS: ClassVar[tuple[str, ...]] = (
        "prompt", "status", "tokens", "total", "context", "seen", "turn", "turn_end",
        "turn_done", "spent", "home", "place", "cached", "first", "must",
    )  # fmt: skip

    @classmethod
    def read(cls, state: PhaseState, row: int) -> Self:
        """Returns the attempt of a row."""
        values = {n: int(state.rows[row, getattr(st, n.upper())]) for n in cls._COLUMNS}
        times = state.times[row]
        return cls(
            row=row,
            ready_s=float(times[st.READY_S]),
            estimate=float(times[st.ESTIMATE]),
            **values,
        )

    def write(self, state: PhaseState) -> None:
        """Writes the attempt back into its row."""
        for name in self._COLUMNS:
            state.rows[self.row, getattr(st, name.upper())] = getattr(self, name)
        state.times[self.row, st.READY_S] = self.ready_s


class Queue:
    """Attempts by key, lower first, ties by age."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Attempt]] = []

    @property
    def head(self) -> Attempt | None:
        """The first; None: nobody waits."""
        return self.heap[0][2] if self.heap else None

    def push(self, key: float, a: Attempt) -> None:
        """Adds an attempt."""
        heapq.heappush(self.heap, (key, a.row, a))

    def pop(self) -> Attempt:
        """Returns the first and takes it out."""
        return heapq.heappop(self.heap)[2]


class Instance:
    """One engine in a phase."""

    def __init__(self, phase: Phase, index: int) -> None:
        self.phase = phase
        self.index = index
        self.rules = phase.state.rules
        self.process: simpy.Process | None = None
        self.start_s = 0.0  # when the present stretch begins
        self.next_s = float("inf")
        self.planned = 0
        self.step = 0
        self.decoding: list[tuple[int, int, Attempt]] = []  # heap: step at which each leaves
        self.admitted: list[Attempt] = []  # hold a slot, in order of admission
        self.lane: list[Attempt] = []  # prefills that ride along, in order
        self.batch = 0  # of these, how many share the next step; 1: one that may take several
        self.batch_s = 0.0
        self.idle: list[Attempt] = []  # caches of attempts that wait, oldest first
        self.own = Queue()  # back from a tool, or preempted
        self.dealt = Queue()
        self.loaded: list[Attempt] = []
        self.copy_free_s = 0.0
        self.begun = 0
        self.context = 0  # tokens that a step reads
        self.used = 0
        self.samples: dict[int, int] = {}  # caches here that share a prompt's blocks
        self.peak = 0
        self.blocked = False
        self.fixed_paid = False
        self.limit = float(phase.state.limits[index])
        self.busy_s = 0.0
        self.noted_s = 0.0

    # ---- cache ---------------------------------------------------------------------------

    def blocks(self, context: int) -> int:
        """Returns the blocks of a context that are its own."""
        return -(-context // self.rules.block) + self.rules.state_blocks - self.rules.shared

    def acquire(self, a: Attempt, context: int) -> None:
        """Takes the blocks of a context."""
        held = self.samples.get(a.prompt, 0)
        self.samples[a.prompt] = held + 1
        self.used += self.blocks(context) + (self.rules.shared if held == 0 else 0)
        self.peak = max(self.peak, self.used)

    def release(self, a: Attempt, context: int) -> None:
        """Gives the blocks of a context back."""
        self.samples[a.prompt] -= 1
        last = self.samples[a.prompt] == 0
        self.used -= self.blocks(context) + (self.rules.shared if last else 0)

    def settle_in(self, a: Attempt) -> None:
        """Counts a cache that is here from the round before."""
        self.acquire(a, a.cached)
        self.idle.append(a)

    def growth(self, steps: int) -> int:
        """Returns the blocks that the decoding attempts take on in so many steps."""
        if self.rules.block == 1:
            return len(self.decoding) * steps
        return sum(
            self.blocks(c + steps) - self.blocks(c) for c in map(self.context_of, self.decoding)
        )

    def context_of(self, entry: tuple[int, int, Attempt]) -> int:
        """Returns the present context of a decoding attempt."""
        finish, _, a = entry
        return a.context + a.run - (finish - self.step)

    def idle_blocks(self, but: Attempt | None = None) -> int:
        """Returns the own blocks of every waiting cache `but` one: room that can be made."""
        return sum(self.blocks(a.cached) for a in self.idle if a is not but)

    def evict(self, a: Attempt) -> None:
        """Takes the cache of a waiting attempt off the GPU."""
        self.idle.remove(a)
        self.release(a, a.cached)
        self.phase.stow(a)
        self.phase.counts["evictions"] += 1
        self.phase.note(self.noted_s, st.EVICT, a, self)

    def make_room(self) -> bool:
        """Frees cache for the next step; returns whether nobody had to be preempted."""
        calm = True
        while self.used + self.growth(1) > self.rules.capacity:
            if self.idle:
                self.evict(self.idle[0])
            else:
                calm = False
                self.preempt(self.admitted[-1])
        return calm

    def preempt(self, a: Attempt) -> None:
        """Takes slot and cache from an attempt; it goes to the front of the instance's queue."""
        if self.rules.throttled:
            running = len(self.admitted)
            self.limit = policy.limit_after_preemption(running, self.rules.decrease)
        was = a.status
        self.leave(a)
        if was == st.RUNNING and self.rules.swap:
            self.phase.stow(a)
        elif was != st.LOADING:
            a.place, a.cached = policy.NOWHERE, 0
        self.own.push(-1.0, a)
        self.phase.counts["preemptions"] += 1
        self.phase.note(self.noted_s, st.PREEMPT, a, self)

    def leave(self, a: Attempt) -> None:
        """Takes an attempt out of its slot, with its tokens; its blocks are given back."""
        self.admitted.remove(a)
        if a.status == st.RUNNING:
            self.decoding.remove((a.finish_step, a.row, a))
            heapq.heapify(self.decoding)
            self.settle(a)
        self.release(a, a.context)
        if a in self.lane:
            self.lane.remove(a)
        if a in self.loaded:
            self.loaded.remove(a)
        a.status = st.PARKED if a.tokens > 0 else st.QUEUED

    def settle(self, a: Attempt) -> None:
        """Writes down the tokens that a decoding attempt generated in its slot."""
        done = a.run - (a.finish_step - self.step)
        a.tokens, a.turn_done, a.spent = a.tokens + done, a.turn_done + done, a.spent + done
        a.context += done
        a.cached = a.seen = a.context
        self.context -= a.context
        if a.first < 0 and a.tokens > 0:
            a.first = self.phase.state.version
        self.phase.counts["decoded_tokens"] += done

    # ---- admission -----------------------------------------------------------------------

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
            or policy.throttle_admits(running, self.limit, self.used, new, rules.high)
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

    # ---- time ----------------------------------------------------------------------------

    def curve(self) -> tuple[Any, ...]:
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
        if self.make_room():
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
                    self.evict(a)
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
        if done:
            phase.finish(done, now_s)
        for a in done:
            phase.note(now_s, st.FINISH, a, self)

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
        for a in self.idle:
            if a.status == st.SPENT_UP:
                a.status = st.PARKED
