"""Debug mode: after every round, that nothing was lost and nothing counted twice."""

from __future__ import annotations

from typing import Final

import numpy as np

from flopwright.plan import rollout_choices as choices
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.flight import Flight
from flopwright.simulator.rollouts.lengths import Ints
from flopwright.simulator.rollouts.rules import rules_of
from flopwright.simulator.rollouts.state import PhaseResult
from flopwright.spec.rollout import RolloutScenario

_AT_REST: Final = (st.QUEUED, st.PARKED, st.FINISHED, st.DONE, st.TOOL, st.JUDGED)


class Ledger:
    """Accounts of attempts, tokens, cache and tool calls, over all rounds."""

    def __init__(self, scenario: RolloutScenario) -> None:
        self._scenario = scenario
        self._ids = np.zeros(0, dtype=np.int64)
        rules = rules_of(scenario)
        self._shares = rules.shared > 0

    def opened(self, flight: Flight) -> None:
        """Looks at what a phase starts from."""
        scenario, rows = self._scenario, flight.rows
        ids = rows[:, st.ID]
        assert len(np.unique(ids)) == len(ids), "an attempt is in flight twice"
        assert (np.diff(ids) > 0).all(), "attempts are not in order of age"
        both = np.intersect1d(ids, flight.pending_rows[:, st.ID])
        assert len(both) == 0, "a complete attempt is in flight again"
        if scenario.stop.count == "attempts":
            assert len(rows) == scenario.num_attempts, "attempts in flight are not N * K"
        assert (rows[:, st.TOKENS] <= rows[:, st.TOTAL]).all()
        self._ids = ids.copy()
        self._context = rows[:, st.CONTEXT].copy()
        self._seen = rows[:, st.SEEN].copy()
        self._turn = rows[:, st.TURN].copy()

    def closed(self, flight: Flight, before: Ints, result: PhaseResult) -> None:
        """Looks at what a phase left behind."""
        rows, rules = flight.rows, flight.rules
        assert (rows[:, st.ID] == self._ids).all(), "attempts came or went during a phase"
        made = rows[:, st.TOKENS] - before
        assert (made >= 0).all(), "tokens were lost"
        assert int(made.sum()) == result.decoded_tokens, "tokens decoded and kept differ"
        status = rows[:, st.STATUS]
        done = status == st.DONE
        complete = done | np.isin(status, (st.FINISHED, st.JUDGED))
        assert (rows[complete, st.TOKENS] == rows[complete, st.TOTAL]).all()
        assert (rows[~complete, st.TOKENS] < rows[~complete, st.TOTAL]).all()
        assert np.isin(status, _AT_REST).all()
        assert sorted(result.finish_row.tolist()) == np.flatnonzero(done).tolist()
        self._contexts(rows, made)
        self._reads(rows, result)
        self._tools(flight, result)
        self._caches(flight, result)
        assert (rows[complete, st.CACHED] == 0).all(), "a complete attempt still has cache"
        assert (rows[:, st.CACHED] <= rows[:, st.CONTEXT]).all()
        if rules.budget:
            assert (rows[:, st.SPENT] <= rules.budget).all()

    def _tools(self, flight: Flight, result: PhaseResult) -> None:
        """Every call is the end of a turn; every sandbox in use has a call that waits for it."""
        rows = flight.rows
        calls = rows[:, st.TURN] - self._turn
        assert (calls >= 0).all()
        assert int(calls.sum()) == result.tool_calls, "tool calls and turns ended differ"
        acting = rows[:, st.STATUS] == st.TOOL
        assert (rows[acting, st.TURN] < rows[acting, st.TURN_END]).all()
        waited_for = int((flight.times[acting, st.READY_S] > result.end_s).sum())
        in_use = int((flight.servers > result.end_s).sum())
        # (a call of an attempt that was thrown away runs to its end all the same)
        kept = self._scenario.stop.keep and self._scenario.staleness.rule != "drop"
        assert not kept or in_use <= waited_for, "a sandbox is held by nobody"

    def _caches(self, flight: Flight, result: PhaseResult) -> None:
        """What instances and pools hold is what attempts have, and no more than there is."""
        rows, rules = flight.rows, flight.rules
        peak = int(result.kv_peak.max())
        assert peak <= rules.capacity, f"{peak} blocks of cache on an instance that holds fewer"
        here = rows[:, st.PLACE] == choices.ON_GPU
        blocks = -(-rows[:, st.CACHED] // rules.block) + rules.state_blocks - rules.shared
        held = np.bincount(rows[here, st.HOME], blocks[here], minlength=rules.instances)
        assert (held <= result.kv_peak).all(), "attempts have more cache than was ever taken"
        for place, room in (
            (choices.ON_HOST, rules.host_tokens),
            (choices.ON_NVME, rules.nvme_tokens),
        ):
            kept = int(rows[rows[:, st.PLACE] == place, st.CACHED].sum())
            assert kept <= room * rules.instances, "a pool holds more than it can"
        assert result.host_peak <= rules.host_tokens * rules.instances
        nowhere = rows[:, st.PLACE] == choices.NOWHERE
        assert (rows[nowhere, st.CACHED] == 0).all(), "a cache is nowhere"

    def _contexts(self, rows: Ints, made: Ints) -> None:
        read = rows[:, st.CONTEXT] - self._context - made
        assert (read >= 0).all(), "context was lost"
        least = self._scenario.prompt_tokens + rows[:, st.TOKENS]
        assert (rows[:, st.CONTEXT] >= least).all()
        if self._scenario.agent is None:
            assert (read == 0).all()

    def _reads(self, rows: Ints, result: PhaseResult) -> None:
        """Every token of context was decoded, or read in once and again for each lost cache."""
        first = int((rows[:, st.SEEN] - self._seen).sum()) - result.decoded_tokens
        once = result.prefill_tokens - result.recomputed_tokens
        assert once <= first, "tokens were prefilled that are in no context"
        assert once == first or self._shares, "context appeared that nobody decoded or read"
        assert result.recomputed_tokens >= 0
