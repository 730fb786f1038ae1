"""Rounds of co-located over-issue: more prompts are in flight than a step consumes."""

from __future__ import annotations

from flopwright.simulator.rollouts.layouts_fleet import Fleet as Servers
from flopwright.simulator.rollouts.layouts_fleet import check_contexts, mean_context
from flopwright.simulator.rollouts.layouts_lengths import GroupStream
from flopwright.simulator.rollouts.layouts_work import Work
from flopwright.spec.rollouts.layout import LayoutInput


class PartialRounds:
    """Rounds of co-located over-issue: a round ends when a step's prompts are complete."""

    def __init__(self, given: LayoutInput, in_flight: int) -> None:
        self.given, self.in_flight = given, in_flight
        batch = given.batch
        check_contexts(given.fleet.engine, batch.prompt_tokens + batch.lengths.cap)
        self.stream = GroupStream(batch.lengths, batch.samples, given.seed)
        self.mean = float(GroupStream(batch.lengths, batch.samples, 1).draw(4096).mean())
        self.carried: list[tuple[list[int], list[int], int]] = []  # lengths, tokens, version
        self.version = 0
        self.peak_tokens, self.preempted = 0.0, 0
        self.mean_tokens: list[float] = []  # by round

    def round(self) -> tuple[float, float, list[int]]:
        """Returns (seconds, response tokens trained, lags of their prompts) of one round."""
        batch, fleet = self.given.batch, self.given.fleet
        fresh = self.stream.draw(self.in_flight - len(self.carried)).tolist()
        groups = [*self.carried, *((row, [0] * len(row), self.version) for row in fresh)]
        work = Work([], [], [])
        for index, (lengths, _, _) in enumerate(groups):
            work.extend(batch.prompt_tokens, lengths, index)
        work.tokens = [t for _, tokens, _ in groups for t in tokens]
        servers = Servers(fleet.engine, fleet.instances, work)
        left = [sum(t < n for n, t in zip(g[0], g[1], strict=True)) for g in groups]
        todo = [r for r in range(len(work.length)) if work.tokens[r] < work.length[r]]
        for index in range(fleet.instances):
            servers.give(index, todo[index :: fleet.instances], 0.0)
        complete = [g for g, n in enumerate(left) if n == 0]
        at_s = 0.0
        while len(complete) < batch.prompts:
            at_s, _, done = servers.event()
            for rid in done:
                group = work.group[rid]
                left[group] -= 1
                if left[group] == 0:
                    complete.append(group)
        for server in servers.servers:
            server.stop(at_s)
        self.peak_tokens = max(self.peak_tokens, *(s.peak_tokens for s in servers.servers))
        self.preempted += sum(s.preempted for s in servers.servers)
        self.mean_tokens.append(mean_context(servers.servers))
        return self._end(groups, work, complete[: batch.prompts], at_s)

    def _end(
        self,
        groups: list[tuple[list[int], list[int], int]],
        work: Work,
        taken: list[int],
        at_s: float,
    ) -> tuple[float, float, list[int]]:
        samples, chosen = self.given.batch.samples, set(taken)
        lags = [self.version - groups[g][2] for g in taken]
        tokens = float(sum(sum(groups[g][0]) for g in taken))
        self.carried = [
            (lengths, work.tokens[g * samples : (g + 1) * samples], version)
            for g, (lengths, _, version) in enumerate(groups)
            if g not in chosen
        ]
        self.version += 1
        return at_s, tokens, lags
