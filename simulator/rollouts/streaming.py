"""An asynchronous loop on the engines of a round: generation goes on beside the update.

A prompt may start while the batch it belongs to is at most `bound` versions ahead: at version v
so many prompts are in flight or complete and not trained on as v + bound + 1 updates take
beyond those already taken (AReaL's admission, arXiv 2505.24298). A version has two parts. While
fewer prompts are complete than an update takes, the trainer waits; with an elastic split its
GPUs generate meanwhile. Then it trains, and the engines go on under the old weights until the
update is over. Both parts are phases of the round's own event loop, so that tools, sandboxes,
short caches, throttles, orders and verdicts are what they are in any other round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.plan import rollout as policy
from flopwright.plan import rollout_choices as choices
from flopwright.report.metrics import RoundMetrics
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.drivers import Kind, driver_for
from flopwright.simulator.rollouts.flight import Flight
from flopwright.simulator.rollouts.lengths import Ints
from flopwright.simulator.rollouts.report import mean_round
from flopwright.simulator.rollouts.rounds import idle_share
from flopwright.simulator.rollouts.state import PhaseResult
from flopwright.spec.rollout import MAX_ATTEMPTS, RolloutScenario, Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """The trainer's GPUs as engines while the trainer waits (elastic split).

    Attributes:
        instances: engines that they make.
        switch_s: until they generate; back_s: until they train again.
        below: they are lent where the buffer holds less than this share of an update.
    """

    instances: int
    switch_s: float = 0.0
    back_s: float = 0.0
    below: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """Steady versions of an asynchronous loop.

    Attributes:
        steady: the mean version; its "generation" is what the trainer waits.
        lags: versions between first token and training, of every attempt trained on.
        lent_share: share of the time in which the trainer's GPUs generate.
    """

    steady: RoundMetrics
    attempts_per_s: float
    lags: Ints
    lent_share: float

    @property
    def mean_staleness(self) -> float:
        """Mean versions behind when trained on."""
        return float(self.lags.mean()) if len(self.lags) else 0.0


def in_flight(scenario: RolloutScenario, bound: int) -> RolloutScenario:
    """Returns the round with as many prompts in flight as the bound lets in.

    Raises:
        InputError: too many of them, or a rule that no asynchronous loop can keep.
    """
    if scenario.staleness.rule == "wait":
        raise InputError(
            Violation(
                field="rollout.staleness.rule",
                value="wait",
                rule="an asynchronous loop waits by its bound on versions, not for old attempts",
                nearest_fix="staleness.rule: drop or mask, or another layout",
            )
        )
    most = scenario.prompts * (bound + 1)
    if most * scenario.samples_per_prompt > MAX_ATTEMPTS:
        raise InputError(
            Violation(
                field="search.staleness_bound",
                value=str(bound),
                rule="lets more attempts into flight than can be simulated",
                limit=f"{MAX_ATTEMPTS:,}",
                nearest_fix="a smaller bound, or fewer prompts",
            )
        )
    stop = Stop(count="groups", keep=scenario.stop.keep, rewarded=scenario.stop.rewarded)
    changed = {"prompts": most, "stop": stop, "stop_fraction": 1 / (bound + 1)}
    return scenario.model_copy(update=changed)


def stream(
    scenario: RolloutScenario,
    bound: int,
    *,
    rounds: int,
    seed: int,
    lending: Lending | None = None,
    loop: Kind = "auto",
    warmup: int | None = None,
) -> StreamReport:
    """Returns steady versions of the loop; same seed, same result.

    Args:
        scenario: a round whose `prompts` are what an update takes.
        bound: versions that a batch may be ahead of the weights it is generated with.
        rounds: versions kept at least, after a warm-up.
        warmup: None: three and twice as many versions as are in flight.
    """
    state = _Stream(scenario, bound, lending, seed, rounds, loop)
    warm = 2 * (bound + 1) + 3 if warmup is None else warmup
    # Where a batch lasts no time, what waits in the buffer goes in a burst: a whole cycle is kept.
    least = bound + 1 if warmup is None else 1
    kept = [state.version() for _ in range(warm + max(rounds, least))][warm:]
    while not any(m.round_time_s for m, _, _ in kept):
        kept.append(state.version())
    total_s = sum(m.round_time_s for m, _, _ in kept)
    completed = sum(m.completed for m, _, _ in kept)
    return StreamReport(
        steady=mean_round([m for m, _, _ in kept]),
        attempts_per_s=completed / total_s,
        lags=np.concatenate([lags for _, lags, _ in kept]),
        lent_share=sum(lent_s for _, _, lent_s in kept) / total_s,
    )


class _Stream:
    """What lives from version to version.

    Attributes:
        ready: prompts that are complete and not trained on, in the order of completion.
        left: samples that are missing of prompts some of whose samples are complete.
    """

    def __init__(
        self,
        scenario: RolloutScenario,
        bound: int,
        lending: Lending | None,
        seed: int,
        rounds: int,
        loop: Kind,
    ) -> None:
        self.batch = scenario.prompts
        self.scenario = in_flight(scenario, bound)
        self.lending = lending
        self.flight = Flight(self.scenario, seed)
        self.driver = driver_for(self.scenario, rounds, loop)
        self.ready: list[int] = []
        self.left: dict[int, int] = {}
        self.parts: list[PhaseResult] = []

    def version(self) -> tuple[RoundMetrics, Ints, float]:
        """Returns (metrics, lags of what was trained on, seconds lent) of one version."""
        flight, update = self.flight, self.scenario.update
        self.parts = []
        flight.buffered = len(self.ready)
        flight.fill()
        wait_s, lent_s, back_s = self._wait()
        trained = self._take()
        tokens = int(trained[:, st.TOTAL].sum()) + len(trained) * self.scenario.prompt_tokens
        update_s = update.fixed_s + update.per_token_s * tokens
        if back_s + update_s > 0 and len(flight.rows):
            self._part(st.NO_LIMIT, back_s + update_s)
        lags = flight.version - trained[:, st.FIRST]
        sync_s = flight.caches() + self.scenario.weight_sync.seconds
        time_s = {"generation": wait_s + back_s, "update": update_s, "weight_sync": sync_s}
        flight.turn_version(sync_s)
        self._count_again()
        return self._metrics(time_s, len(trained), lags), lags, lent_s

    # ---- the two parts of a version --------------------------------------------------------

    def _wait(self) -> tuple[float, float, float]:
        """Generates until an update can begin.

        Returns (seconds, those of lent GPUs, seconds until the trainer has its GPUs back). A
        switch that was begun is paid for, also where the update could begin before its end.
        """
        if self._missing() == 0:
            return 0.0, 0.0, 0.0
        lending = self.lending
        if lending is None or len(self.ready) >= lending.below * self.batch:
            return self._part(self._missing(), inf).end_s, 0.0, 0.0
        alone_s = self._part(self._missing(), lending.switch_s).end_s
        if self._missing() == 0:
            return alone_s, 0.0, lending.back_s
        self._make_room(lending.instances)
        lent_s = self._part(self._missing(), inf, lending.instances).end_s
        return alone_s + lent_s, lent_s, lending.back_s

    def _missing(self) -> int:
        return max(0, self.batch - len(self.ready))

    def _part(self, needed: int, deadline_s: float, lent: int = 0) -> PhaseResult:
        """Generates until so many prompts are complete, or so many seconds have passed."""
        flight = self.flight
        state = flight.phase()
        if lent:
            rules = replace(state.rules, instances=state.rules.instances + lent)
            state.rules = rules
            state.limits = np.concatenate([state.limits, np.full(lent, rules.limit)])
        state.needed, state.deadline_s = needed, deadline_s
        result = self.driver(state, False)
        flight.limits = state.limits[: flight.rules.instances]
        ids = flight.rows[result.finish_row, st.ID] // self.scenario.samples_per_prompt
        for prompt in ids.tolist():
            self._one_more(prompt)
        flight.put_aside()
        flight.pass_time(result.end_s)
        if lent:
            flight.leave_beyond(flight.rules.instances)
        self.parts.append(result)
        return result

    def _one_more(self, prompt: int) -> None:
        left = self.left.get(prompt, self.scenario.samples_per_prompt) - 1
        if left:
            self.left[prompt] = left
        else:
            self.left.pop(prompt, None)
            self.ready.append(prompt)

    def _make_room(self, lent: int) -> None:
        """Sends enough running attempts back into the queue for the lent engines' fair share."""
        rows, own = self.flight.rows, self.flight.rules.instances
        waits = np.isin(rows[:, st.STATUS], (st.QUEUED, st.PARKED))
        here = waits & (rows[:, st.PLACE] == choices.ON_GPU)
        share = round(int(waits.sum()) * lent / (own + lent))
        count = max(0, share - int((waits & ~here).sum()))
        running = np.flatnonzero(here)
        self.flight.leave(running[policy.lent(rows[running, st.CONTEXT], count)])

    # ---- training ---------------------------------------------------------------------------

    def _take(self) -> Ints:
        """Returns the attempts of the update's prompts, those complete first, and forgets them."""
        taken, self.ready = self.ready[: self.batch], self.ready[self.batch :]
        return self.flight.take(taken)

    def _count_again(self) -> None:
        """Counts what is complete anew where attempts may have been thrown away for age."""
        if self.scenario.staleness.rule != "drop":
            return
        samples = self.scenario.samples_per_prompt
        prompts, counts = np.unique(
            self.flight.pending_rows[:, st.ID] // samples, return_counts=True
        )
        there = dict(zip(prompts.tolist(), counts.tolist(), strict=True))
        self.ready = [p for p in self.ready if there.get(p, 0) == samples]
        self.left = {p: samples - n for p, n in there.items() if n < samples}

    def _metrics(self, time_s: dict[str, float], completed: int, lags: Ints) -> RoundMetrics:
        parts: Sequence[PhaseResult] = self.parts
        round_s = sum(time_s.values())
        generated = sum(p.decoded_tokens for p in parts)
        values, counts = np.unique(lags, return_counts=True)
        busy_s = sum((p.busy_s[: self.flight.rules.instances] for p in parts), np.zeros(1))
        block = self.flight.rules.block
        return RoundMetrics(
            round_time_s=round_s,
            time_s=time_s,
            tail_s=0.0,
            gpu_idle_share=idle_share(self.scenario, busy_s, round_s),
            tokens_per_s=generated / round_s if round_s > 0 else 0.0,
            completed=completed,
            generated_tokens=generated,
            kv_peak_tokens=max((int(p.kv_peak.max()) for p in parts), default=0) * block,
            preemptions=sum(p.preemptions for p in parts),
            staleness=dict(zip(values.tolist(), counts.tolist(), strict=True)),
        )
