"""The attempts in flight from round to round: who comes, who goes, what is kept of them."""

from __future__ import annotations

import numpy as np

from flopwright.plan import rollout as policy
from flopwright.plan import rollout_choices as choices
from flopwright.plan.rollout import Flags
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.lengths import Floats, Ints
from flopwright.simulator.rollouts.rules import rules_of
from flopwright.simulator.rollouts.state import PhaseState, Rules
from flopwright.simulator.rollouts.workload import Drawn, Workload
from flopwright.spec.rollout import RolloutScenario


class Flight:
    """Rows by age, and the turns that are left of each.

    Attributes:
        pending_rows, pending_times: complete attempts that wait for the samples of their prompt.
        version: of the policy that generates.
        buffered: whole prompts that are complete and still count as in flight.
    """

    def __init__(self, scenario: RolloutScenario, seed: int) -> None:
        self.scenario = scenario
        self.rules: Rules = rules_of(scenario)
        self.version = 0
        self.buffered = 0
        self.rows = np.zeros((0, st.COLUMNS), dtype=np.int64)
        self.times = np.zeros((0, st.FLOAT_COLUMNS))
        self.turn_tokens = self.turn_read = np.zeros(0, dtype=np.int64)
        self.turn_s = np.zeros(0)
        self.pending_rows, self.pending_times = self.rows, self.times
        self._workload = Workload(scenario, seed)
        self._restarts = Workload(scenario, seed, restart=True)
        self._next_id = 0
        agent = scenario.agent
        places = agent.sandbox.places if agent is not None and agent.sandbox.pause else None
        self.servers = np.zeros(places or 0)
        self.judges = np.zeros(scenario.reward.workers if scenario.stop.rewarded else 0)
        self.limits = np.full(scenario.instances, self.rules.limit)
        share = scenario.fraction
        units = (
            scenario.num_attempts if scenario.stop.count == "attempts" else scenario.num_prompts
        )
        self.needed = policy.stop_count(units, share)
        if scenario.stop.rule == "token_budget":
            self.needed = st.NO_LIMIT  # the phase ends when nobody has budget left

    # ---- filling up ----------------------------------------------------------------------

    def fill(self) -> None:
        """Brings attempts (or whole prompts) in flight back to what a round starts with."""
        samples = self.scenario.samples_per_prompt
        if self.scenario.stop.count == "groups":
            there = len(np.unique(self.rows[:, st.ID] // samples))
            count = (self.scenario.num_prompts - there - self.buffered) * samples
        else:
            count = self.scenario.num_attempts - len(self.rows)
        ids = self._next_id + np.arange(count)
        self._next_id += count
        self._append(ids, self._workload.draw(ids, self.version))

    def _append(self, ids: Ints, drawn: Drawn) -> None:
        rows = np.zeros((len(ids), st.COLUMNS), dtype=np.int64)
        ends = np.cumsum(drawn.turns) + len(self.turn_tokens)
        rows[:, st.ID] = ids
        rows[:, st.STATUS] = st.QUEUED
        rows[:, st.TOTAL] = drawn.total
        rows[:, st.CONTEXT] = self.scenario.prompt_tokens
        rows[:, st.TURN] = ends - drawn.turns
        rows[:, st.TURN_END] = ends
        rows[:, st.HOME] = rows[:, st.FIRST] = -1
        rows[:, st.SUBMITTED] = self.version
        times = np.zeros((len(ids), st.FLOAT_COLUMNS))
        times[:, st.ESTIMATE], times[:, st.SCORE] = drawn.estimate, drawn.scores
        times[:, st.VERDICT_S] = drawn.verdict_s
        self.rows = np.concatenate([self.rows, rows])
        self.times = np.concatenate([self.times, times])
        self.turn_tokens = np.concatenate([self.turn_tokens, drawn.turn_tokens])
        self.turn_read = np.concatenate([self.turn_read, drawn.turn_read])
        self.turn_s = np.concatenate([self.turn_s, drawn.turn_s])

    def keep(self, chosen: Ints) -> None:
        """Forgets all rows but those at these indices, and the turns that are over."""
        self.rows, self.times = self.rows[chosen], self.times[chosen]
        starts, ends = self.rows[:, st.TURN], self.rows[:, st.TURN_END]
        counts = ends - starts
        offsets = np.cumsum(counts) - counts
        index = np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()))
        self.turn_tokens = self.turn_tokens[index]
        self.turn_read, self.turn_s = self.turn_read[index], self.turn_s[index]
        self.rows[:, st.TURN], self.rows[:, st.TURN_END] = offsets, offsets + counts

    def restart(self, ids: Ints, scores: Floats) -> None:
        """Begins attempts anew under their old numbers: fresh lengths, no tokens, no cache."""
        if len(ids) == 0:
            return
        self._append(ids, self._restarts.again(ids, scores, self.version))
        self.keep(np.argsort(self.rows[:, st.ID], kind="stable"))

    # ---- one phase -----------------------------------------------------------------------

    def phase(self) -> PhaseState:
        """Returns the state of the next generation phase; it writes into these rows."""
        scenario, rows = self.scenario, self.rows
        samples = scenario.samples_per_prompt
        prompts, index = np.unique(rows[:, st.ID] // samples, return_inverse=True)
        rows[:, st.PROMPT] = index
        rows[:, st.SPENT] = 0
        rows[:, st.MUST] = self._overdue(prompts, index)
        waiting = self.pending_rows[:, st.ID] // samples
        place = np.searchsorted(prompts, waiting)
        mine = (place < len(prompts)) & (prompts[np.minimum(place, len(prompts) - 1)] == waiting)
        left = np.full(len(prompts), samples)
        np.subtract.at(left, place[mine], 1)
        seen = np.zeros(len(prompts), dtype=np.int64)
        np.maximum.at(seen, place[mine], self.pending_rows[mine, st.TOTAL])
        key = (
            rows[:, st.ID] if scenario.schedule.routing == "uniform" else rows[:, st.ID] // samples
        )
        return PhaseState(
            rules=self.rules,
            rows=rows,
            times=self.times,
            turn_tokens=self.turn_tokens,
            turn_read=self.turn_read,
            turn_s=self.turn_s,
            left=left,
            seen=seen,
            dealt=key % scenario.instances,
            servers=self.servers,
            judges=self.judges,
            limits=self.limits,
            needed=self.needed,
            version=self.version,
        )

    def _overdue(self, prompts: Ints, index: Ints) -> Ints:
        """Returns 1 for attempts whose prompt must be complete before the version changes."""
        rule = self.scenario.staleness
        if rule.rule != "wait":
            return np.zeros(len(index), dtype=np.int64)
        assert rule.max_versions is not None
        if rule.max_versions == 0:  # whatever starts must end
            return np.ones(len(index), dtype=np.int64)
        samples = self.scenario.samples_per_prompt
        late = np.zeros(len(prompts), dtype=bool)
        old = policy.too_old(self.rows[:, st.FIRST], self.version + 1, rule.max_versions)
        late[index[old]] = True
        old = policy.too_old(self.pending_rows[:, st.FIRST], self.version + 1, rule.max_versions)
        late |= np.isin(prompts, self.pending_rows[old, st.ID] // samples)
        return late[index].astype(np.int64)

    def dispatch(self) -> tuple[Ints, Floats]:
        """Returns the attempts of the prompts that are complete now; the others wait."""
        self._add_pending(self.rows[:, st.STATUS] == st.DONE)
        samples = self.scenario.samples_per_prompt
        prompts = self.pending_rows[:, st.ID] // samples
        return self._taken(np.isin(prompts, policy.dispatch(prompts, samples)))

    def put_aside(self) -> None:
        """Lets what is complete wait for training, out of the way of the next phase."""
        done = self.rows[:, st.STATUS] == st.DONE
        self._add_pending(done)
        self.keep(np.flatnonzero(~done))

    def take(self, prompts: list[int]) -> Ints:
        """Returns the attempts of prompts that were put aside, and forgets them."""
        mine = self.pending_rows[:, st.ID] // self.scenario.samples_per_prompt
        return self._taken(np.isin(mine, prompts))[0]

    def _add_pending(self, done: Flags) -> None:
        self.pending_rows = np.concatenate([self.pending_rows, self.rows[done]])
        self.pending_times = np.concatenate([self.pending_times, self.times[done]])

    def _taken(self, chosen: Flags) -> tuple[Ints, Floats]:
        rows, times = self.pending_rows, self.pending_times
        self.pending_rows, self.pending_times = rows[~chosen], times[~chosen]
        return rows[chosen], times[chosen]

    # ---- between phases ------------------------------------------------------------------

    def turn_version(self, elapsed_s: float) -> tuple[int, int]:
        """Moves on to the next version: what is done goes, what is too old is begun anew.

        Args:
            elapsed_s: seconds from the start of this phase to the start of the next.

        Returns:
            (attempts, tokens) that were thrown away.
        """
        self.version += 1
        rows = self.rows
        staying = rows[:, st.STATUS] != st.DONE
        drop = np.zeros(len(rows), dtype=bool)
        ids, scores, lost = np.zeros(0, dtype=np.int64), np.zeros(0), 0
        rule = self.scenario.staleness
        if rule.rule == "drop":
            assert rule.max_versions is not None
            drop = staying & policy.too_old(rows[:, st.FIRST], self.version, rule.max_versions)
            old = policy.too_old(self.pending_rows[:, st.FIRST], self.version, rule.max_versions)
            ids, scores = self.pending_rows[old, st.ID], self.pending_times[old, st.SCORE]
            lost = int(self.pending_rows[old, st.TOKENS].sum())
            self.pending_rows = self.pending_rows[~old]
            self.pending_times = self.pending_times[~old]
        if not self.scenario.stop.keep:
            whole = np.isin(rows[:, st.STATUS], (st.FINISHED, st.JUDGED))
            drop |= staying & (rows[:, st.TOKENS] > 0) & ~whole
        lost += int(rows[drop, st.TOKENS].sum())
        ids = np.concatenate([ids, rows[drop, st.ID]])
        scores = np.concatenate([scores, self.times[drop, st.SCORE]])
        self.keep(np.flatnonzero(staying & ~drop))
        self.restart(ids, scores)
        self.pass_time(elapsed_s)
        return len(ids), lost

    def pass_time(self, elapsed_s: float) -> None:
        """Lets tools and judges go on for so long."""
        self.times[:, st.READY_S] -= elapsed_s
        self.servers -= elapsed_s
        self.judges -= elapsed_s

    def caches(self) -> float:
        """Does with caches what the weight update asks for; returns the seconds it takes.

        To park is to write what is on the GPUs to the host, all instances at once.
        """
        rows, kv = self.rows, self.scenario.kv
        if kv.on_update == "drop":
            rows[:, st.PLACE], rows[:, st.CACHED] = choices.NOWHERE, 0
            return 0.0
        if kv.on_update == "keep":
            return 0.0
        return self.leave(np.flatnonzero(rows[:, st.PLACE] == choices.ON_GPU))

    def leave(self, chosen: Ints) -> float:
        """Takes the caches of these rows off their GPUs, into the pools while those have room.

        Returns the seconds in which the instances write them, all at once.
        """
        rows, rules = self.rows, self.rules
        places, cached = rows[:, st.PLACE], rows[:, st.CACHED]
        host = rules.host_tokens * rules.instances - int(cached[places == choices.ON_HOST].sum())
        nvme = rules.nvme_tokens * rules.instances - int(cached[places == choices.ON_NVME].sum())
        written_s = np.zeros(rules.instances)
        for row in chosen:
            tokens = int(cached[row])
            where = choices.cache_goes(tokens, host, nvme)
            host -= tokens if where == choices.ON_HOST else 0
            nvme -= tokens if where == choices.ON_NVME else 0
            written_s[rows[row, st.HOME] % rules.instances] += tokens * rules.load_s[where]
            places[row] = where
            cached[row] = tokens if where else 0
        return float(written_s.max())

    def leave_beyond(self, instances: int) -> None:
        """Brings home what is on instances that are there no more."""
        rows = self.rows
        gone = rows[:, st.HOME] >= instances
        self.leave(np.flatnonzero(gone & (rows[:, st.PLACE] == choices.ON_GPU)))
        rows[gone, st.HOME] = rows[gone, st.ID] % instances
