"""Saved tensors dropped, narrowed and moved over 1 and 2 real ranks: numbers, bytes, messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import activation_checks as checks
import numpy as np
import pytest
from launched_ranks import run_ranks

from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import ShardShape
from flopwright.plan.lower import lower
from flopwright.plan.parallel import SELECTIVE_TAGS, ParallelPlan
from flopwright.plan.schedules.actions import ActionKind
from flopwright.simulator.memory.stages import FP8_BYTES_PER_NUMBER
from flopwright.simulator.training.layers import kind_of
from flopwright.simulator.training.recompute import Policy, kept
from flopwright.spec.cluster import DTYPE_BYTES

pytestmark = pytest.mark.slow

PROGRAM = Path(checks.__file__)
Rank = dict[str, dict[str, Any]]
# A backward that is whole lets go of everything; a split one keeps what weights wait for.
WHOLE = {"1f1b", "gpipe", "interleaved_1f1b"}


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[Rank]:
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    return run_ranks(PROGRAM, world, folder)


def _plan(name: str, world: int) -> ParallelPlan:
    return ParallelPlan(**checks.PLANS[world][name])


@pytest.mark.slow
def test_gradients_equal_the_single_process(ranks: list[Rank]) -> None:
    """To the bit, where no sum over ranks has another order."""
    for rank in ranks:
        for name, found in rank.items():
            bound = 1e-14 if _plan(name, len(ranks)).dp > 1 else 0.0
            assert found["gradients"] <= bound, name
            assert found["loss"] <= bound, name


def test_the_executed_log_is_the_lowered_list(ranks: list[Rank]) -> None:
    for rank in ranks:
        for name, found in rank.items():
            assert found["log_equal"], name
            plan = _plan(name, len(ranks))
            assert (found["moves"].get("OFFLOAD", 0) > 0) <= plan.activation_offload
            assert (found["moves"].get("RECOMPUTE", 0) > 0) == (plan.recompute != "none")
    for name in ranks[0]:
        if _plan(name, len(ranks)).activation_offload:
            assert any(rank[name]["moves"].get("OFFLOAD") for rank in ranks), name


def test_a_second_run_does_not_count_an_experts_load_again(ranks: list[Rank]) -> None:
    assert all(found["loads_equal"] for rank in ranks for found in rank.values())


def test_nothing_is_left_over(ranks: list[Rank]) -> None:
    for rank in ranks:
        for name, found in rank.items():
            assert found["live_bytes"] == 0, name
            assert found["host_tensors"] == 0, name


def _kept_bytes(plan: ParallelPlan, chunk: int) -> tuple[float, float]:
    """Returns what the rows say that a chunk keeps of a micro-batch: (moves, stays narrow)."""
    spec, moves, narrow = checks.small_model(), 0.0, 0.0
    tags = frozenset(plan.recompute_tags) or SELECTIVE_TAGS
    inner = list(plan.chunk_layers(spec.num_layers)[chunk])
    layers = [*inner]
    layers += [-1] * (chunk == 0) + [spec.num_layers] * (chunk == plan.num_chunks - 1)
    shape = ShardShape(micro_batch_size=1, seq_len=checks.SEQ, dtype="fp64", ep=plan.ep)
    for layer in layers:
        kind, lives = kind_of(spec, layer), layer_cost(spec, layer, shape).lives
        policy = Policy(plan.recompute, tags if plan.recompute == "selective" else frozenset())
        depth = plan.recompute_layers
        if depth is not None and inner.index(layer) >= depth if layer in inner else False:
            policy = Policy("none")
        policy = policy.of(kind)
        if policy.name == "full":
            moves += float(lives.bytes[lives.name.index("input"), 0])
            continue
        stays = lives.bytes[:, 0] * kept(layer_cost(spec, layer, shape), policy, kind)
        fp8 = lives.fp8 & plan.fp8_activations
        moves += float(stays[~fp8].sum())
        narrow += float(stays[fp8].sum()) * FP8_BYTES_PER_NUMBER / DTYPE_BYTES["fp64"]
    return moves, narrow


def _peak(plan: ParallelPlan, stage: int) -> float:
    """Returns the most that a stage's list holds at once by the rows."""
    held, peak = 0.0, 0.0
    for action in lower(plan, checks.MICROBATCHES)[stage]:
        if action.chunk < 0:
            continue
        moves, narrow = _kept_bytes(plan, action.chunk)
        held += {
            ActionKind.FORWARD: moves + narrow,
            ActionKind.OFFLOAD: -moves,
            ActionKind.FETCH: moves,
            ActionKind.BACKWARD: -moves - narrow,
        }.get(action.kind, 0.0)
        peak = max(peak, held)
    assert abs(held) < 1
    return peak


def test_kept_bytes_at_the_fullest_moment_are_those_of_the_rows(ranks: list[Rank]) -> None:
    compared = 0
    for index, rank in enumerate(ranks):
        for name, found in rank.items():
            plan = _plan(name, len(ranks))
            if plan.schedule in WHOLE and plan.ep == 1:
                expected = _peak(plan, index if plan.pp > 1 else 0)
                assert found["peak_bytes"] == expected, name
                compared += 1
    assert compared >= 4


def test_what_runs_again_is_timed_as_its_action(ranks: list[Rank]) -> None:
    for rank in ranks:
        for name, found in rank.items():
            assert len(found["timed"]) == found["moves"].get("RECOMPUTE", 0), name


def test_exchanges_repeat_as_the_rows_say(ranks: list[Rank]) -> None:
    """By micro-batch and layer of experts: a block that runs again sends its rows again."""
    layers = sum(checks.small_model().is_moe_layer(i) for i in range(4))
    runs = checks.MICROBATCHES * layers
    for rank in ranks:
        for name, found in rank.items():
            if not name.startswith("ep2"):
                continue
            sent = {k: v / runs for k, v in found["exchanges"].items()}
            whole, down = name in {"ep2 moe", "ep2 full"}, name == "ep2 kimi"
            assert sent["ep_dispatch"] == 1 + whole, name
            assert sent["ep_combine"] == 1 + (whole or down), name
            assert sent["ep_dispatch_grad"] == sent["ep_combine_grad"] == 1, name


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.slow)], indirect=True, scope="module"
)
def test_bytes_of_an_expert_parallel_rank(ranks: list[Rank]) -> None:
    """Rows arrive unevenly: what is kept lies between the rows' figures for fewest and most."""
    plans = {n: _plan(n, 2) for n in ranks[0] if n.startswith("ep2")}
    for name, plan in plans.items():
        found = np.array([rank[name]["peak_bytes"] for rank in ranks], float)
        assert found.mean() == pytest.approx(_peak(plan, 0), rel=0.1), name
