"""Slots and cache of one inference engine on the event engine, counted in blocks, exactly."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import simpy

from flopwright.plan import rollout_choices as policy
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.attempt import Attempt, Queue

if TYPE_CHECKING:
    from flopwright.simulator.rollouts.generation import Phase


class Slots(ABC):
    """Who holds a slot or a waiting cache of one engine in a phase."""

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

    @abstractmethod
    def nudge(self, now_s: float) -> None:
        """Brings the next boundary forward; an instance knows how."""

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

    @property
    def active(self) -> int:
        """Attempts that run or are in a tool call."""
        return self.begun - len(self.own.heap)

    def evict(self, a: Attempt, *, pressed: bool = True) -> None:
        """Takes the cache of a waiting attempt off the GPU.

        Where it was pressed and is lost, the throttle takes it for a preemption.
        """
        self.idle.remove(a)
        self.release(a, a.cached)
        self.phase.stow(a)
        if self.rules.throttled and pressed and a.place == policy.NOWHERE:
            self.limit = policy.limit_after_preemption(self.active, self.rules.decrease)
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
            self.limit = policy.limit_after_preemption(self.active, self.rules.decrease)
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
