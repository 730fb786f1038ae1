"""Rounds against a loop over single tokens, and the invariants that hold whatever happens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.simulator.rollouts import closed_forms as cf
from flopwright.simulator.rollouts.decode import steps_time_s, whole_steps
from flopwright.simulator.rollouts.lengths import LengthStream
from flopwright.simulator.rollouts.rounds import simulate, simulate_rounds
from flopwright.spec.rollout import (
    DecodeStep,
    DeterministicLengths,
    EmpiricalLengths,
    ExponentialLengths,
    LognormalLengths,
    RolloutScenario,
    Switch,
    Update,
    WeightSync,
)


def scenario(**changes) -> RolloutScenario:
    data = {
        "name": "test",
        "prompts": 20,
        "samples_per_prompt": 4,
        "prompt_tokens": 5,
        "lengths": ExponentialLengths(mean=40),
        "stop_fraction": 0.8,
        "decode": DecodeStep(
            per_step="1 s", per_attempt="0.25 s", per_context_token="0.0078125 s"
        ),
        "switch": Switch(to_update="2 s", to_generation="3 s"),
        "update": Update(fixed="5 s", per_token="0.5 s"),
        "weight_sync": WeightSync(fixed="1 s", size="8 GB", bandwidth="4 GB/s"),
        **changes,
    }
    return RolloutScenario(**data)


@dataclass
class TokenLoop:
    """The same loop written without any of its code: one step, one token at a time.

    Each instance has its own clock; a step that ends exactly when the round ends counts.
    """

    s: RolloutScenario
    seed: int
    attempts: list[dict] = field(default_factory=list)
    version: int = 0
    next_id: int = 0

    def __post_init__(self) -> None:
        self.lengths = LengthStream(self.s.lengths, self.seed)
        self.needed = math.ceil(self.s.stop_fraction * self.s.num_attempts - 1e-9)
        self.share = math.ceil(self.s.num_attempts / self.s.instances)
        self.slots = self.s.slots_per_instance or self.s.num_attempts

    def step_s(self, active: list[dict]) -> float:
        d = self.s.decode
        return d.a_s + d.c_s * len(active) + d.kappa_s * self.context(active)

    def context(self, active: list[dict]) -> int:
        return sum(self.s.prompt_tokens + a["tokens"] for a in active)

    def round(self) -> dict:
        while len(self.attempts) < self.s.num_attempts:
            length = int(self.lengths.draw(1)[0])
            self.attempts.append({"id": self.next_id, "left": length, "tokens": 0, "first": None})
            self.next_id += 1
        done = [a for a in self.attempts if a["left"] == 0][: self.needed]
        finish_s = [0.0] * len(done)
        queue = [a for a in self.attempts if a["left"] > 0]
        queue.sort(key=lambda a: (a["tokens"] == 0, a["id"]))  # resume first
        busy = [[] for _ in range(self.s.instances)]
        while queue and any(len(b) < self.slots for b in busy):
            min((b for b in busy if len(b) < self.slots), key=len).append(queue.pop(0))
        begin = [0.0] * self.s.instances
        peak, slot_s, end_s = 0, 0.0, 0.0
        while len(done) < self.needed:
            ends = [begin[i] + self.step_s(b) if b else math.inf for i, b in enumerate(busy)]
            end_s = min(ends)
            peak = max(peak, 0, *(self.context(b) for b in busy))
            for i in [i for i, e in enumerate(ends) if e == end_s]:
                slot_s += len(busy[i]) * (end_s - begin[i])
                begin[i] = end_s
                for a in busy[i]:
                    a["first"] = self.version if a["first"] is None else a["first"]
                    a["left"] -= 1
                    a["tokens"] += 1
                peak = max(peak, self.context(busy[i]))
                ready = sorted((a for a in busy[i] if a["left"] == 0), key=lambda a: a["id"])
                busy[i] = [a for a in busy[i] if a["left"] > 0]
                if self.s.ties == "strict":
                    ready = ready[: self.needed - len(done)]
                done += ready
                finish_s += [end_s] * len(ready)
                while queue and len(busy[i]) < self.slots and len(done) < self.needed:
                    busy[i].append(queue.pop(0))
        for i, b in enumerate(busy):
            slot_s += len(b) * (end_s - begin[i])
        self.attempts = [a for a in self.attempts if a not in done]
        whole = min(self.slots, self.share) * self.s.instances * end_s
        out = {
            "time_s": end_s,
            "ids": sorted(a["id"] for a in done),
            "finish_s": finish_s,
            "lags": [self.version - a["first"] for a in sorted(done, key=lambda a: a["id"])],
            "parked": sum(a["tokens"] for a in self.attempts),
            "peak": peak,
            "idle": 1 - slot_s / whole if whole else 0.0,
        }
        self.version += 1
        return out


small = st.fixed_dictionaries(
    {
        "prompts": st.integers(1, 8),
        "samples_per_prompt": st.integers(1, 3),
        "prompt_tokens": st.integers(0, 9),
        "lengths": st.sampled_from(
            [
                ExponentialLengths(mean=6),
                LognormalLengths(mean=9, sigma=1.0, cap=30),
                EmpiricalLengths(values=(1, 2, 3, 11)),
                DeterministicLengths(tokens=4),
            ]
        ),
        "stop_fraction": st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.9, 1.0]),
        "ties": st.sampled_from(["all", "strict"]),
        # binary fractions: sums over tokens and over jumps are then equal to the last bit
        "decode": st.sampled_from(
            [
                DecodeStep(per_step="1 s", per_attempt="0.25 s", per_context_token="0.0078125 s"),
                DecodeStep(per_step="0.5 s"),
                DecodeStep(per_attempt="0.125 s"),
                DecodeStep(per_step="0.5 s", per_context_token="0.25 s"),
            ]
        ),
    }
)


def compare(s: RolloutScenario, seed: int, rounds: int) -> None:
    loop = TokenLoop(s, seed)
    for record in simulate_rounds(s, rounds, seed):
        want = loop.round()
        m = record.metrics
        assert m.time_s["generation"] == pytest.approx(want["time_s"], abs=1e-6)
        assert m.completed == len(want["ids"])
        np.testing.assert_allclose(record.finish_s, want["finish_s"], atol=1e-6)
        assert record.lags.tolist() == want["lags"]
        assert m.parked_tokens == want["parked"]
        assert m.kv_peak_tokens == want["peak"]
        assert m.gpu_idle_share == pytest.approx(want["idle"], abs=1e-9)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True)
@given(small, st.integers(0, 99), st.sampled_from([None, 1, 2, 5]))
def test_one_instance_equals_a_token_loop(data, seed, slots):
    compare(scenario(**data, slots_per_instance=slots), seed, rounds=5)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(small, st.integers(0, 99), st.integers(2, 4))
def test_many_instances_equal_a_token_loop(data, seed, instances):
    data |= {"ties": "all", "prompts": max(data["prompts"], instances)}
    compare(scenario(**data, instances=instances), seed, rounds=4)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(small, st.integers(0, 99), st.integers(1, 3), st.sampled_from([None, 1, 3]))
def test_nothing_is_lost_or_counted_twice(data, seed, instances, slots):
    data |= {"prompts": max(data["prompts"], instances)}
    s = scenario(**data, instances=instances, slots_per_instance=slots)
    records = simulate_rounds(s, 6, seed)
    drawn = LengthStream(s.lengths, seed).draw(10_000)
    parked, submitted, completed, in_flight_rounds = 0, s.num_attempts, 0, 0
    for r in records:
        m = r.metrics
        assert parked + m.generated_tokens == int(r.lengths.sum()) + m.parked_tokens
        assert m.completed >= math.ceil(s.stop_fraction * s.num_attempts - 1e-9)
        assert sum(m.staleness.values()) == m.completed == len(r.finish_s)
        assert sum(m.time_s.values()) == pytest.approx(m.round_time_s, abs=1e-12)
        assert r.finish_s.tolist() == sorted(r.finish_s.tolist())
        assert (r.lags >= 0).all()
        assert (r.rounds_in_flight >= r.lags + 1).all()
        parked, completed = m.parked_tokens, completed + m.completed
        submitted += m.completed
        in_flight_rounds += int(r.rounds_in_flight.sum())
    # what was completed are the first lengths of the stream, each at most once
    left = sorted(drawn[:submitted].tolist())
    for length in np.concatenate([r.lengths for r in records]).tolist():
        left.remove(length)
    # Little: every round holds N * K attempts; the rounds of the completed ones are among them
    assert in_flight_rounds <= 6 * s.num_attempts
    trained = sum(len(r.trained_lags) for r in records)
    assert trained % s.samples_per_prompt == 0
    assert trained <= completed


def test_phase_identity_against_a_token_loop():
    rng = np.random.default_rng(1)
    decode = DecodeStep(per_step="7 s", per_attempt="0.3 s", per_context_token="0.001 s")
    for needed in (1, 30, 40):
        remaining, context = rng.integers(1, 200, 40), rng.integers(0, 300, 40)
        left, total, ctx = remaining.copy(), 0.0, context.astype(float)
        while (left == 0).sum() < needed:
            active = left > 0
            total += 7 + 0.3 * active.sum() + 0.001 * ctx[active].sum()
            left[active] -= 1
            ctx[active] += 1
        assert cf.phase_time_s(decode, remaining, context, needed) == pytest.approx(
            total, abs=1e-6
        )


@pytest.mark.parametrize("fraction", [0.5, 0.9, 1.0])
def test_phases_of_long_attempts_equal_the_identity(fraction):
    """Lengths in the ten thousands, several rounds: resumed attempts bring their context."""
    s = scenario(
        prompts=64,
        lengths=LognormalLengths(mean=20_000, sigma=1.0),
        stop_fraction=fraction,
        decode=DecodeStep(per_step="20 ms", per_attempt="37 us", per_context_token="1.3 ns"),
    )
    m = math.ceil(fraction * 256 - 1e-9)
    stream = LengthStream(s.lengths, 0)
    left, have = stream.draw(256), np.zeros(256, dtype=np.int64)
    for record in simulate_rounds(s, 6, 0):
        want = cf.phase_time_s(s.decode, left, have + s.prompt_tokens, m)
        assert record.metrics.time_s["generation"] == pytest.approx(want, abs=1e-6)
        last = int(np.sort(left)[m - 1])
        step = np.minimum(left, last)
        assert record.metrics.generated_tokens == step.sum()
        keep = left > last
        have, left = (have + step)[keep], (left - step)[keep]
        fresh = 256 - len(left)
        left = np.concatenate([left, stream.draw(fresh)])
        have = np.concatenate([have, np.zeros(fresh, dtype=np.int64)])


@settings(derandomize=True, deadline=None)
@given(
    st.floats(0, 2), st.floats(0, 1), st.floats(0, 0.1), st.integers(1, 50), st.integers(0, 500),
    st.integers(1, 400), st.floats(0, 1.2),
)  # fmt: skip
def test_whole_steps_is_the_inverse_of_the_step_time(a, c, kappa, active, context, most, share):
    decode = DecodeStep.model_construct(a_s=a, c_s=c, kappa_s=kappa)
    elapsed = share * steps_time_s(decode, active, context, most)
    got = whole_steps(decode, active, context, elapsed, most)
    loop, t = 0, 0.0
    while loop < most:
        t = steps_time_s(decode, active, context, loop + 1)
        if t > elapsed:
            break
        loop += 1
    assert got == loop


def test_step_time_is_the_sum_of_its_steps():
    decode = DecodeStep(per_step="20 ms", per_attempt="37 us", per_context_token="13 ns")
    loop = sum(0.02 + 37e-6 * 9 + 13e-9 * (1000 + 9 * j) for j in range(777))
    assert steps_time_s(decode, 9, 1000, 777) == pytest.approx(loop, rel=1e-12)


def test_phases_of_a_round_in_order_and_amount():
    s = scenario()
    for r in simulate_rounds(s, 5, 3):
        names = list(r.metrics.time_s)
        assert names == [
            "generation", "switch_to_update", "update", "switch_to_generation", "weight_sync",
        ]  # fmt: skip
        assert r.metrics.time_s["switch_to_update"] == 2
        assert r.metrics.time_s["update"] == 5 + 0.5 * r.trained_tokens
        assert r.metrics.time_s["switch_to_generation"] == 3
        assert r.metrics.time_s["weight_sync"] == 1 + 2


def test_phases_are_told_to_the_hook_without_gaps():
    seen: list[tuple[str, float, float]] = []
    records = simulate_rounds(scenario(), 3, 0, hook=lambda *event: seen.append(event))
    assert [name for name, _, _ in seen] == [*records[0].metrics.time_s] * 3
    assert seen[0][1] == 0
    assert all(a[2] == b[1] for a, b in pairwise(seen))
    seconds = [s for r in records for s in r.metrics.time_s.values()]
    assert [end - start for _, start, end in seen] == pytest.approx(seconds)


def test_one_sample_a_prompt_is_trained_on_at_once():
    s = scenario(samples_per_prompt=1, prompts=80)
    for r in simulate_rounds(s, 8, 0):
        assert sorted(r.trained_lags.tolist()) == sorted(r.lags.tolist())
        assert r.trained_tokens == r.lengths.sum() + 5 * r.metrics.completed


def test_a_prompt_is_trained_on_with_all_its_samples_only():
    s = scenario(samples_per_prompt=4, stop_fraction=0.5)
    records = simulate_rounds(s, 60, 0)
    trained = np.concatenate([r.trained_lags for r in records])
    at_completion = np.concatenate([r.lags for r in records])
    assert all(len(r.trained_lags) % 4 == 0 for r in records)
    assert trained.mean() > at_completion.mean()  # waiting for siblings ages them
    assert at_completion.size - trained.size < 2 * s.num_attempts


def test_tail_and_completion_curve():
    s = scenario(stop_fraction=1.0)
    record = simulate_rounds(s, 1, 5)[0]
    ends = np.sort(record.finish_s)
    assert record.metrics.tail_s == pytest.approx(ends[-1] - ends[80 - 8 - 1])
    cut = simulate_rounds(scenario(stop_fraction=0.8), 1, 5)[0]
    assert cut.metrics.tail_s == 0
    curve = simulate(scenario(ties="strict"), rounds=2).completion_curve
    assert curve[0] == (0.0, 0.0)
    assert curve[-1][1] == 64 / 80
    assert [p[0] for p in curve] == sorted(p[0] for p in curve)


def test_kv_peak_is_the_peak_of_the_resident_tokens():
    s = scenario(
        prompts=500, lengths=ExponentialLengths(mean=2000), stop_fraction=1.0, prompt_tokens=0
    )
    lengths = LengthStream(s.lengths, 0).draw(2000)
    exact = max(step * int((lengths >= step).sum()) for step in range(1, 8000))
    peak = simulate_rounds(s, 1, 0)[0].metrics.kv_peak_tokens
    assert peak == exact
    assert peak / 2000 == pytest.approx(2000 / math.e, rel=0.05)  # fluid peak mu/e


def test_same_seed_same_result_and_lengths_are_paired_over_lambda():
    s = scenario()
    assert simulate(s, 5, 9).to_data() == simulate(s, 5, 9).to_data()
    assert simulate(s, 5, 9).to_data() != simulate(s, 5, 10).to_data()
    whole = simulate_rounds(scenario(stop_fraction=1.0), 1, 9)[0]
    for fraction in (0.25, 0.5, 0.9):
        part = simulate_rounds(scenario(stop_fraction=fraction, ties="strict"), 1, 9)[0]
        count = len(part.finish_s)
        assert sorted(part.lengths.tolist()) == sorted(whole.lengths.tolist())[:count]


def test_report_adds_up():
    report = simulate(scenario(), rounds=12)
    assert len(report.rounds) == 12
    assert report.warmup_rounds == math.ceil(5 / 0.8)
    seconds = sum(m.round_time_s for m in report.rounds)
    completed = sum(m.completed for m in report.rounds)
    assert report.attempts_per_s == pytest.approx(completed / seconds)
    assert report.steady.round_time_s == pytest.approx(seconds / 12)
    tokens = sum(m.generated_tokens for m in report.rounds)
    assert report.steady.tokens_per_s == pytest.approx(tokens / seconds)
    assert report.steady.kv_peak_tokens == max(m.kv_peak_tokens for m in report.rounds)
    assert sum(report.steady.staleness.values()) == completed
