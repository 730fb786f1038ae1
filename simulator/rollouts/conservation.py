"""Debug mode: after every round, that nothing was lost and nothing counted twice."""

from __future__ import annotations

import numpy as np

from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.flight import Flight
from flopwright.simulator.rollouts.lengths import Ints
from flopwright.simulator.rollouts.rules import rules_of
from flopwright.simulator.rollouts.state import PhaseResult
from flopwright.spec.rollout import RolloutScenario


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

    def closed(self, flight: Flight, before: Ints, result: PhaseResult) -> None:
        """Looks at what a phase left behind."""
        rows, rules = flight.rows, flight.rules
        assert (rows[:, st.ID] == self._ids).all(), "attempts came or went during a phase"
        made = rows[:, st.TOKENS] - before
        assert (made >= 0).all(), "tokens were lost"
        assert int(made.sum()) == result.decoded_tokens, "tokens decoded and kept differ"
        status = rows[:, st.STATUS]
        done = status == st.DONE
        complete = done | (status == st.FINISHED)
        assert (rows[complete, st.TOKENS] == rows[complete, st.TOTAL]).all()
        assert (rows[~complete, st.TOKENS] < rows[~complete, st.TOTAL]).all()
        assert np.isin(status, (st.QUEUED, st.PARKED, st.FINISHED, st.DONE, st.TOOL)).all()
        assert sorted(result.finish_row.tolist()) == np.flatnonzero(done).tolist()
        self._contexts(rows, made)
        self._reads(rows, result)
        peak = int(result.kv_peak.max())
        assert peak <= rules.capacity, f"{peak} blocks of cache on an instance that holds fewer"
        assert result.host_peak <= rules.host_tokens * rules.instances
        assert (rows[complete, st.CACHED] == 0).all(), "a complete attempt still has cache"
        assert (rows[:, st.CACHED] <= rows[:, st.CONTEXT]).all()
        if rules.budget:
            assert (rows[:, st.SPENT] <= rules.budget).all()

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
