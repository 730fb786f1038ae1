"""Attempts that act: turns, tools, sandboxes, verdicts; theory and limits."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts import theory
from flopwright.simulator.rollouts.rewards import queue_ends
from flopwright.simulator.rollouts.rounds import simulate_rounds
from flopwright.simulator.rollouts.workload import Workload, draw_seconds
from flopwright.spec.rollout import (
    Agent,
    DecodeStep,
    DeterministicLengths,
    ExponentialLengths,
    HostPool,
    KvCache,
    LognormalLengths,
    PrefillTable,
    Reward,
    RolloutScenario,
    Sandbox,
    Schedule,
    Throttle,
    TimeLaw,
)

STEP = DecodeStep(per_step="1 s")


def acting(attempts: int = 24, fraction: float = 1.0, **changes) -> RolloutScenario:
    data = {
        "lengths": ExponentialLengths(mean=400, cap=4000),
        "decode": STEP,
        "ties": "strict",
        "agent": Agent(
            tokens_per_turn=50,
            tool_tokens=DeterministicLengths(tokens=20),
            tool_time=TimeLaw(mean="30 s", kind="exponential"),
        ),
        **changes,
    }
    return RolloutScenario(name="acting", prompts=attempts, stop_fraction=fraction, **data)


def drawn(s: RolloutScenario, count: int, seed: int = 0):
    return Workload(s, seed).draw(np.arange(count), 0)


# ---- the workload ------------------------------------------------------------------------


def test_turns_are_equal_parts_of_the_attempt_and_the_last_calls_no_tool():
    s = acting()
    d = drawn(s, 200)
    assert d.turns.tolist() == np.ceil(d.total / 50).astype(int).tolist()
    ends = np.cumsum(d.turns)
    for total, begin, end in zip(d.total, ends - d.turns, ends, strict=True):
        tokens = d.turn_tokens[begin:end]
        assert tokens.sum() == total
        assert tokens.max() - tokens.min() <= 1
        assert d.turn_read[end - 1] == 0
        assert d.turn_s[end - 1] == 0
        assert (d.turn_read[begin : end - 1] == 20).all()


def test_the_nth_attempt_is_the_same_however_many_are_drawn_at_a_time():
    s = acting(group_correlation=0.5, samples_per_prompt=4)
    whole = drawn(s, 30)
    parts = Workload(s, 0)
    some = [parts.draw(np.arange(a, b), 0) for a, b in ((0, 1), (1, 7), (7, 7 + 23))]
    for name in ("total", "scores", "turns", "turn_tokens", "turn_s"):
        joined = np.concatenate([getattr(d, name) for d in some])
        np.testing.assert_array_equal(joined, getattr(whole, name))


def test_an_attempt_ends_where_its_context_is_full():
    agent = acting().agent.model_copy(update={"max_context": 300})
    d = drawn(acting(agent=agent, prompt_tokens=40), 400)
    ends = np.cumsum(d.turns)
    free = drawn(acting(prompt_tokens=40), 400)
    for i, (begin, end) in enumerate(zip(ends - d.turns, ends, strict=True)):
        context = 40 + d.turn_tokens[begin:end].sum() + d.turn_read[begin:end].sum()
        assert context <= 300
        if d.total[i] < free.total[i]:  # it was cut, and not earlier than need be
            assert context > 300 - 20 - 1 - 50
    assert (d.total < free.total).any()


def test_samples_of_a_prompt_share_the_variance_they_are_said_to():
    law = LognormalLengths(mean=1000, sigma=1.0)
    for rho in (0.0, 0.3, 0.8, 1.0):
        s = acting(agent=None, lengths=law, samples_per_prompt=4, group_correlation=rho)
        logs = np.log(drawn(s, 40_000).total).reshape(-1, 4)
        between = logs.mean(axis=1).var() - logs.var(axis=1, ddof=1).mean() / 4
        assert between / logs.var() == pytest.approx(rho, abs=0.03)
        assert np.exp(logs).mean() == pytest.approx(1000, rel=0.06)


@pytest.mark.parametrize("kind", ["fixed", "exponential", "lognormal", "normal"])
def test_laws_of_time_have_their_mean_and_their_limit(kind):
    law = TimeLaw(mean="10 s", kind=kind, spread=0.3)
    values = draw_seconds(law, np.random.default_rng(0), 40_000)
    assert values.mean() == pytest.approx(10, rel=0.03)
    assert values.min() >= 0
    cut = law.model_copy(update={"at_most_s": 9.0})
    assert draw_seconds(cut, np.random.default_rng(0), 100).max() <= 9


def test_sandboxes_are_created_forked_and_resumed():
    box = Sandbox(create="2 s", image_pull="5 s", image_hit=0.25, fork="1 s", resume="50 ms")
    agent = Agent(tokens_per_turn=50, tool_time=TimeLaw(mean="1 s"), sandbox=box)
    d = drawn(
        acting(agent=agent, samples_per_prompt=4, lengths=DeterministicLengths(tokens=150)), 400
    )
    seconds = d.turn_s.reshape(-1, 3)
    assert (seconds[:, 1] == 1.05).all()
    assert (seconds[:, 2] == 0).all()
    first = seconds[:, 0].reshape(-1, 4)
    assert set(np.round(first[:, 0], 6).tolist()) == {3.0, 8.0}
    assert (first[:, 0] == 8.0).mean() == pytest.approx(0.75, abs=0.2)
    assert (first[:, 1:] == 2.0).all()


# ---- a phase -----------------------------------------------------------------------------


def test_a_phase_is_never_shorter_than_the_longest_chain_of_thinking_and_tools():
    for decode in (STEP, DecodeStep(per_step="1e-9 ns")):
        s = acting(decode=decode)
        d = drawn(s, 24)
        owner = np.repeat(np.arange(24), d.turns)
        tools = np.bincount(owner, d.turn_s)
        chain = tools + d.total * decode.a_s
        r = simulate_rounds(s, 1, 0)[0].phase
        # one instance, no slots to wait for: a step is never late but by its remainder
        assert chain.max() <= r.end_s <= chain.max() + d.turns.max() * decode.a_s
        assert r.tool_calls == (d.turns - 1).sum()


@pytest.mark.slow
def test_the_share_that_decodes_is_renewal_reward():
    s = acting(
        400, 0.8, lengths=ExponentialLengths(mean=1000), prompt_tokens=5,
        agent=Agent(tokens_per_turn=50, tool_time=TimeLaw(mean="30 s", kind="exponential")),
    )  # fmt: skip
    records = simulate_rounds(s, 14, 1)[6:]
    busy = sum(r.phase.busy_s.sum() for r in records)
    whole = sum(r.phase.end_s for r in records) * 400
    d = drawn(s, 4000)
    share = theory.decoding_share(
        d.total.mean(), np.bincount(np.repeat(np.arange(4000), d.turns), d.turn_s).mean()
    )
    # the cut tail idles too: those complete early wait for the end of the round
    assert busy / whole == pytest.approx(share * _in_flight(records, 400), rel=0.05)


def _in_flight(records, attempts: int) -> float:
    """Returns the mean share of a phase in which an attempt is not complete yet."""
    left = sum(attempts * r.phase.end_s - (r.phase.end_s - r.finish_s).sum() for r in records)
    return float(left / (attempts * sum(r.phase.end_s for r in records)))


def test_pausing_pays_where_thinking_is_longer_than_checkpoint_and_resume():
    assert theory.pausing_saves_s(10.0, 0.133, 0.049) > 0
    assert theory.pausing_saves_s(0.182, 0.133, 0.049) == pytest.approx(0)
    plain = simulate_rounds(acting(), 1, 3)[0].phase
    box = Sandbox(resume="49 ms", checkpoint="133 ms")
    agent = acting().agent.model_copy(update={"sandbox": box})
    paused = simulate_rounds(acting(agent=agent), 1, 3)[0].phase
    most = drawn(acting(), 24, 3).turns.max()
    assert plain.end_s <= paused.end_s <= plain.end_s + 0.049 * most + 1.0 * most


def test_few_places_make_tool_calls_wait_and_many_none():
    waits = []
    for hosts in (1, 2, 4, 40):
        box = Sandbox(hosts=hosts, host_cpus=2, cpus=1)
        agent = acting().agent.model_copy(update={"sandbox": box})
        r = simulate_rounds(acting(agent=agent), 2, 3, debug=True)[1].phase
        waits.append(r.tool_wait_s)
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 100
    assert waits[-1] == 0
    free = simulate_rounds(acting(), 2, 3)[1].phase
    assert r.end_s == free.end_s
    box = Sandbox(
        hosts=2, host_cpus=2, cpus=4, overcommit=8.0, memory="1 GiB", host_memory="3 GiB"
    )
    assert box.places == 2 * 4
    with pytest.raises(ValueError, match="larger than a host"):
        Sandbox(hosts=1, host_cpus=2, cpus=4)


def test_sandboxes_that_are_not_paused_limit_how_many_attempts_are_begun():
    box = Sandbox(hosts=1, host_cpus=6, pause=False)
    agent = acting().agent.model_copy(update={"sandbox": box})
    r = simulate_rounds(acting(agent=agent), 1, 3, log=True)[0].phase
    begun, most = set(), 0
    for kind, attempt in zip(r.log.kind.tolist(), r.log.attempt.tolist(), strict=True):
        if kind == st.ADMIT:
            begun.add(attempt)
        elif kind == st.FINISH:
            begun.discard(attempt)
        most = max(most, len(begun))
    assert most == 6


def test_tools_go_on_while_the_gpus_train():
    agent = Agent(tokens_per_turn=50, tool_time=TimeLaw(mean="5000 s"))
    s = acting(8, 0.5, agent=agent, lengths=DeterministicLengths(tokens=100), update="4000 s")
    first, second = simulate_rounds(s, 2, 0)
    assert first.phase.end_s == 50 + 5000 + 50
    late = s.model_copy(update={"update": s.update.model_copy(update={"fixed_s": 0.0})})
    assert second.phase.end_s <= simulate_rounds(late, 2, 0)[1].phase.end_s


def test_a_cache_kept_through_a_tool_call_is_read_on_and_a_dropped_one_again():
    prefill = PrefillTable(per_token=0.01)
    got = {}
    for idle in ("keep", "drop"):
        kv = KvCache(per_token="1 B", idle=idle)
        got[idle] = simulate_rounds(acting(kv=kv, prefill=prefill), 1, 0, debug=True)[0].phase
    d = drawn(acting(), 24)
    assert got["keep"].prefill_tokens == d.turn_read.sum()
    assert got["keep"].recomputed_tokens == 0
    assert got["drop"].prefill_tokens == d.turn_read.sum() + got["drop"].recomputed_tokens
    assert got["drop"].recomputed_tokens > 10 * d.turn_read.sum() / 3
    host = HostPool(size="1 GB", bandwidth="1 GB/s")
    kv = KvCache(per_token="1 B", idle="drop", host=host)
    pooled = simulate_rounds(acting(kv=kv, prefill=prefill), 1, 0, debug=True)[0].phase
    assert pooled.recomputed_tokens == 0
    assert pooled.loaded_tokens == got["drop"].recomputed_tokens
    assert pooled.host_peak > 0


def test_samples_share_the_cache_of_their_prompt():
    from flopwright.spec.rollout import EngineModel, StepTable

    def phase(share: bool):
        engine = EngineModel(
            decode=StepTable.linear(1.0, 0.0, 0.0), prefill=PrefillTable(per_token=0.001),
            block_tokens=16, prefix_cache=share, kv_bytes_per_token=1.0,
        )  # fmt: skip
        s = acting(
            8, agent=None, decode=None, engine=engine, samples_per_prompt=4, prompt_tokens=1600
        )
        return simulate_rounds(s, 1, 0, debug=True)[0].phase

    shared, own = phase(True), phase(False)
    assert own.prefill_tokens == 32 * 1600
    assert shared.prefill_tokens == 8 * 1600
    assert own.kv_peak[0] - shared.kv_peak[0] >= 20 * 100


# ---- verdicts ----------------------------------------------------------------------------


def test_a_queue_in_front_of_workers_is_first_come_first_served():
    free = [0.0, 0.0]
    ends = queue_ends(np.array([0.0, 1.0, 2.0, 2.0]), np.array([5.0, 2.0, 4.0, 1.0]), free)
    assert ends.tolist() == [5.0, 3.0, 7.0, 6.0]


def test_verdicts_overlap_generation_and_only_the_rest_is_waited_for():
    quick = acting(reward=Reward(kind="program", time=TimeLaw(mean="1 s"), workers=100))
    slow = acting(reward=Reward(kind="program", time=TimeLaw(mean="100 s"), workers=2))
    a, b = (simulate_rounds(s, 1, 0)[0].metrics.time_s for s in (quick, slow))
    assert a["reward"] == pytest.approx(1.0)  # of the last one
    assert b["reward"] >= 100
    judge = Reward(
        kind="judge", workers=4, read_tokens=1000, verdict_tokens=500,
        read_tokens_per_s=10_000, verdict_tokens_per_s=50,
    )  # fmt: skip
    judged = simulate_rounds(acting(reward=judge), 1, 0)[0]
    assert judged.metrics.time_s["reward"] >= 500 / 50 + 1000 / 10_000


def test_a_tournament_compares_every_pair_of_a_complete_prompt():
    tournament = Reward(kind="tournament", verdict_tokens=100, verdict_tokens_per_s=50, workers=1)
    s = acting(1, samples_per_prompt=6, agent=None, reward=tournament)
    r = simulate_rounds(s, 1, 0)[0]
    read = 2 * r.lengths.mean() / 10_000
    assert r.metrics.time_s["reward"] == pytest.approx(15 * (2 + read))
    few = tournament.model_copy(update={"pairs_per_prompt": 5})
    r = simulate_rounds(s.model_copy(update={"reward": few}), 1, 0)[0]
    assert r.metrics.time_s["reward"] == pytest.approx(5 * (2 + read))


def test_effort_and_verbosity_are_counted():
    from flopwright.spec.rollout import EffortBudget, VerbosityLimit

    law = ExponentialLengths(mean=400)
    s = acting(
        400, agent=None, lengths=law, effort=EffortBudget(base=400, tau=1.5),
        verbosity=VerbosityLimit(base=400, sigma=1.25),
    )  # fmt: skip
    r = simulate_rounds(s, 1, 0)[0]
    assert r.lengths.max() == 600
    assert r.at_budget == (r.lengths == 600).sum()
    assert r.at_budget / 400 == pytest.approx(np.exp(-1.5), abs=0.1)
    assert r.verbose == (r.lengths > 500).sum()


def test_the_throttle_stays_near_the_best_concurrency_while_lengths_grow_eightfold():
    """What is best at first ends in preemptions all the time; the throttle finds the new best."""

    def round_of(mean: int, **changes):
        s = acting(
            128, agent=None, kv=KvCache(per_token="1 B", capacity="100 kB"), prompt_tokens=50,
            prefill=PrefillTable(per_token=5e-5, per_pair=1e-8),
            decode=DecodeStep(per_step="20 ms", per_attempt="0.3 ms", per_context_token="100 ns"),
            lengths=LognormalLengths(mean=mean, sigma=0.6, cap=40_000), ties="all", **changes,
        )  # fmt: skip
        return simulate_rounds(s, 1, 0)[0]

    grid = (8, 16, 32, 64, 128)
    first = {c: round_of(800, schedule=Schedule(concurrency=c)).phase.end_s for c in grid}
    last = {c: round_of(6400, schedule=Schedule(concurrency=c)) for c in grid}
    best_at_first = min(first, key=first.__getitem__)
    assert best_at_first >= 64
    storm, calm = last[best_at_first], round_of(6400, throttle=Throttle())
    assert round_of(800, throttle=Throttle()).phase.end_s <= 1.1 * min(first.values())
    assert calm.phase.end_s <= 1.1 * min(r.phase.end_s for r in last.values())
    assert storm.metrics.preemptions > 300
    assert calm.metrics.preemptions < 0.5 * storm.metrics.preemptions
