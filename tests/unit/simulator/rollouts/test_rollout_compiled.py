"""The compiled loop against the reference: the same log, event by event, under every policy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from flopwright.errors import InputError
from flopwright.simulator.rollouts import drivers
from flopwright.simulator.rollouts.compiled import folder
from flopwright.simulator.rollouts.rounds import simulate, simulate_rounds
from flopwright.simulator.rollouts.state import KINDS
from flopwright.spec.rollout import (
    DecodeStep,
    EngineModel,
    ExponentialLengths,
    LognormalLengths,
    RolloutScenario,
    StepTable,
)

pytest.importorskip("numba", reason="the compiled loop needs the extra: fast")

_LOG = ("time_s", "kind", "attempt", "instance", "kv_tokens")
_COUNTS = (
    "end_s", "preemptions", "evictions", "prefill_tokens", "recomputed_tokens", "loaded_tokens",
    "prefill_s", "tool_calls", "tool_wait_s", "decoded_tokens", "events", "host_peak",
)  # fmt: skip


def compare(scenario: RolloutScenario, seed: int, rounds: int = 3) -> Counter[str]:
    """Runs both loops and holds them equal to the last bit; returns what happened how often."""
    both = [
        simulate_rounds(scenario, rounds, seed, loop=kind, log=True, debug=True)
        for kind in ("simpy", "compiled")
    ]
    seen: Counter[str] = Counter()
    for reference, compiled in zip(*both, strict=True):
        for name in _LOG:
            a, b = (getattr(r.phase.log, name) for r in (reference, compiled))
            np.testing.assert_array_equal(a, b, err_msg=f"{scenario.name} {name}")
        for name in _COUNTS:
            assert getattr(reference.phase, name) == getattr(compiled.phase, name), name
        assert reference.metrics == compiled.metrics
        assert reference.trained_token_lags == compiled.trained_token_lags
        seen.update(KINDS[k] for k in compiled.phase.log.kind.tolist())
        seen["dropped"] += compiled.dropped
    return seen


@pytest.mark.slow
def test_event_logs_are_equal_on_random_rounds_of_every_policy(scenario_of_seed):
    seen: Counter[str] = Counter()
    for seed in range(200):  # three rounds each
        seen += compare(scenario_of_seed(seed), seed)
    # the rounds were not all alike: everything that can happen did
    assert min(seen[kind] for kind in KINDS) > 20, seen
    assert seen["dropped"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("instances", [1, 3])
def test_reports_are_equal_on_a_real_size(instances):
    scenario = RolloutScenario(
        name="size",
        prompts=60,
        samples_per_prompt=4,
        prompt_tokens=300,
        lengths=LognormalLengths(mean=4000, sigma=1.0, cap=30_000),
        stop_fraction=0.8,
        instances=instances,
        decode=DecodeStep(per_step="20 ms", per_attempt="40 us", per_context_token="3 ns"),
    )
    a = simulate(scenario, 10, 3, loop="simpy").to_data()
    assert a == simulate(scenario, 10, 3, loop="compiled").to_data()


@pytest.mark.slow
def test_blocks_without_a_capacity_end_too():
    engine = EngineModel(decode=StepTable.linear(0.02, 0.001, 1e-6), block_tokens=16)
    law = LognormalLengths(mean=900, sigma=1.0)
    compare(RolloutScenario(name="blocks", prompts=12, lengths=law, engine=engine), 2)


def _big() -> RolloutScenario:
    return RolloutScenario(
        name="big",
        prompts=4096,
        lengths=ExponentialLengths(mean=100),
        decode=DecodeStep(per_step="1 ms"),
    )


def test_big_rounds_without_the_extra_are_refused_with_the_hint(monkeypatch):
    monkeypatch.setattr(drivers, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"flopwright\[fast\]"):
        drivers.driver_for(_big(), 10_000, "auto")
    with pytest.raises(InputError, match="not installed"):
        drivers.driver_for(_big(), 1, "compiled")
    slow = drivers.driver_for(_big(), 10_000, "simpy")  # on request it runs slowly
    assert slow.__module__.endswith("generation")


@pytest.mark.parametrize("before", [False, True])
def test_the_loop_is_chosen_by_the_number_of_events(monkeypatch, before):
    monkeypatch.setattr(drivers, "is_compiled", lambda: before)
    assert drivers.driver_for(_big(), 1, "auto").__module__.endswith("generation")
    middle = drivers.driver_for(_big(), 10, "auto").__module__
    assert middle.endswith("run" if before else "generation")
    assert drivers.driver_for(_big(), 1000, "auto").__module__.endswith("run")


def test_the_folder_of_machine_code_changes_with_any_source(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = folder.code_folder()
    assert before.parent == tmp_path / "flopwright" / "compiled"
    assert not folder.is_compiled()
    changed = tmp_path / "state.py"
    changed.write_text("x = 1\n")
    monkeypatch.setattr(folder.state, "__file__", str(changed))
    assert folder.code_folder() != before
    (folder.code_folder()).mkdir(parents=True)
    (folder.code_folder() / "loop.nbc").write_bytes(b"x")
    assert folder.is_compiled()
