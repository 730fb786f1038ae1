"""The update phase on so many GPUs: its split, its time a token, and the memory it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.rollout import stop_count
from flopwright.planner.ranking import best_of_each_layout, layout_ids, order
from flopwright.planner.rollouts.bounds import acting_tokens
from flopwright.planner.search import price
from flopwright.planner.space import legal_candidates
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.simulator.rollouts.lengths import Ints
from flopwright.simulator.rollouts.update import update_times
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.flops import model_flops_per_token
from flopwright.spec.loop import LoopScenario, nodes_of
from flopwright.spec.loop_parts import Training
from flopwright.spec.model import ModelSpec
from flopwright.spec.rollouts.layout import UpdatePhase
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import LearningRate, Workload
from flopwright.units import show_bytes

# Splits of the update kept for every number of GPUs; the fastest that the memory holds is taken.
_KEPT: Final = 5
_STATES: Final = ("weights", "gradients", "optimizer_state")
UpdateOf = Callable[[int], "UpdateOption"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOption:
    """One way to train.

    Attributes:
        parallel: the split; None where the scenario states the time.
        fixed_s, per_token_s: of an update on so many trained tokens, prompts included.
        state_bytes: of a GPU: what stays between updates; peak_bytes: at the fullest moment;
            host_bytes: of a node, what the split keeps there; host_states_bytes: of these, what
            stays between updates (offloaded activations do not).
    """

    gpus: int
    parallel: ParallelPlan | None
    fixed_s: float
    per_token_s: float
    state_bytes: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    host_states_bytes: int = 0
    assumptions: tuple[str, ...] = ()


def update_option(loop: LoopScenario, gpus: int) -> UpdateOption:
    """Returns how so many GPUs train best.

    Raises:
        InputError: no split of the model fits them, with what the nearest lacks.
    """
    train = loop.train
    if train is None:
        update = loop.rollout.update
        return UpdateOption(
            gpus=gpus, parallel=None, fixed_s=update.fixed_s, per_token_s=update.per_token_s
        )
    if train.model is None:
        assert train.gpu_s_per_token is not None
        share = -(-train.state_bytes // gpus)
        return UpdateOption(
            gpus=gpus,
            parallel=None,
            fixed_s=train.fixed_s,
            per_token_s=train.gpu_s_per_token / gpus,
            state_bytes=share,
            peak_bytes=share,
        )
    return _searched(loop, train, train.model, gpus)


def least_update(loop: LoopScenario, gpus: int) -> UpdateOption:
    """Returns an update that no split beats, for a bound: every GPU at its peak, no memory.

    A scenario that states its update has that one.
    """
    train = loop.train
    if train is None or train.model is None:
        return update_option(loop, gpus)
    assert loop.cluster is not None
    peak = max(loop.cluster.node.gpu.peak_flops_per_s.values()) * gpus
    passes = 1 + train.ptx_share + len(train.log_prob) / 3
    flops = model_flops_per_token(train.model, 1, "params_only") * passes
    return UpdateOption(gpus=gpus, parallel=None, fixed_s=0.0, per_token_s=flops / peak)


def _searched(loop: LoopScenario, train: Training, model: ModelSpec, gpus: int) -> UpdateOption:
    """Returns the best split by the training search, priced on sequences of the loop's lengths."""
    assert loop.cluster is not None
    tokens = trained_tokens(loop)
    scenario = update_scenario(loop, train, model, gpus, int(tokens.sum()))
    timed: list[tuple[float, int, ParallelPlan]] = []
    refused = None
    for rank, plan in enumerate(_best_splits(scenario)):
        try:
            timed.append((_seconds(loop, train, model, plan, tokens)[0], rank, plan))
        except InputError as error:  # a rule that holds for the batch but not for its pieces
            refused = refused or error
    if not timed:
        assert refused is not None
        raise refused
    return _priced(loop, train, model, min(timed)[2], tokens)


def _best_splits(scenario: Scenario) -> list[ParallelPlan]:
    """Returns the splits that are fastest by their bound, the best of each of a few layouts.

    The bound is a closed form (docs/search.md); which of the few is best is decided on the
    lengths of the loop.

    Raises:
        InputError: none fits, with what the nearest lacks.
    """
    candidates = legal_candidates(scenario)
    priced = price(scenario, candidates, scenario_calibration(scenario))
    if not priced.fits.any():
        nearest = int(np.argmin(priced.peak_bytes))
        lacking = int(priced.peak_bytes[nearest]) - scenario.cluster.node.gpu.hbm_bytes
        short = f"lacks {show_bytes(lacking)} a GPU" if lacking > 0 else "lacks host memory"
        raise InputError(
            Violation(
                field="update.gpus",
                value=str(scenario.cluster.num_gpus),
                rule="no split of the update fits these GPUs",
                limit=f"{candidates.plan(nearest).label()} {short}",
                nearest_fix="train on more GPUs, or allow offloads in train.search",
            )
        )
    ordered = order(priced, scenario)
    ordered = ordered[priced.fits[ordered]]
    best = best_of_each_layout(ordered, layout_ids(candidates))[:_KEPT]
    return [candidates.plan(int(index)) for index in best]


def update_scenario(
    loop: LoopScenario, train: Training, model: ModelSpec, gpus: int, tokens: int
) -> Scenario:
    """Returns the update as a training scenario: packed sequences, one optimizer step each."""
    assert loop.cluster is not None
    batch = max(1, round(tokens * (1 + train.ptx_share) / train.mini_batches / train.seq_len))
    batch = _rounded(batch)
    cluster = _free_hosts(loop, train, nodes_of(loop.cluster, gpus))
    longer = model.model_copy(update={"max_seq_len": max(model.max_seq_len, train.seq_len)})
    return Scenario(
        name=f"{loop.name}_update",
        model=longer,
        cluster=cluster,
        workload=Workload(
            seq_len=train.seq_len,
            global_batch_size=batch,
            total_tokens=train.seq_len * batch,
            precision=train.precision,
            optimizer=train.optimizer,
            learning_rate=LearningRate(kind="constant", warmup_steps=0),
        ),
        search=train.search,
        stack=train.stack,
    )


def _free_hosts(loop: LoopScenario, train: Training, cluster: ClusterSpec) -> ClusterSpec:
    """Returns the cluster with the host memory that system and other models leave."""
    held = -(-train.held_bytes // max(1, loop.num_gpus // cluster.node.gpus))
    free = max(0, cluster.node.host_bytes - loop.hosts.reserved_bytes - held)
    node = cluster.node.model_copy(update={"host_bytes": free})
    return cluster.model_copy(update={"node": node})


def _rounded(batch: int) -> int:
    """Returns the nearest number with few odd factors: splits must divide the batch.

    A packed batch may be padded to any number of sequences.
    """
    unit = 1 << max(0, batch.bit_length() - 3)
    return max(1, round(batch / unit)) * unit


def trained_tokens(loop: LoopScenario) -> Ints:
    """Returns tokens of each sequence of a mean update, prompt included."""
    rollout = loop.rollout
    count = stop_count(rollout.num_attempts, rollout.fraction)
    own = acting_tokens(rollout, count)
    return (own + rollout.prompt_tokens).astype(np.int64)


def _priced(
    loop: LoopScenario,
    train: Training,
    model: ModelSpec,
    plan: ParallelPlan,
    tokens: Ints,
) -> UpdateOption:
    half = tokens[: max(1, len(tokens) // 2)]
    seconds, notes = _seconds(loop, train, model, plan, tokens)
    more = float(tokens.sum() - half.sum())
    less = _seconds(loop, train, model, plan, half)[0] if more else seconds
    per_token_s = max(0.0, seconds - less) / more if more else 0.0
    per_token_s = min(per_token_s, seconds / float(tokens.sum()))
    scenario = update_scenario(loop, train, model, plan.world_size, int(tokens.sum()))
    held = evaluate(scenario, Candidates.from_plans((plan,)), scenario_calibration(scenario))
    zero = np.zeros((1, 1))
    states = sum((held.memory_bytes.get(name, zero)[:, 0] for name in _STATES), zero[:, 0])
    light = plan.model_copy(update={"activation_offload": False})
    return UpdateOption(
        gpus=plan.world_size,
        parallel=plan,
        fixed_s=seconds - per_token_s * float(tokens.sum()),
        per_token_s=per_token_s,
        state_bytes=int(states.max()),
        peak_bytes=int(held.peak_bytes[0]),
        host_bytes=int(held.host_bytes[0]),
        host_states_bytes=host_bytes(scenario, light),
        assumptions=notes,
    )


def _seconds(
    loop: LoopScenario, train: Training, model: ModelSpec, plan: ParallelPlan, tokens: Ints
) -> tuple[float, tuple[str, ...]]:
    """Returns (seconds of an update on these sequences, what was taken for granted)."""
    assert loop.cluster is not None
    phase = UpdatePhase(
        gpus=plan.world_size,
        plan=plan,
        mini_batches=train.mini_batches,
        micro_batch_tokens=train.seq_len * plan.micro_batch_size,
        log_prob=train.log_prob,
        ptx_share=train.ptx_share,
        stack=train.stack,
    )
    found = update_times(model, nodes_of(loop.cluster, plan.world_size), phase, tokens)
    return found.update_s + found.log_prob_s, found.assumptions


def host_bytes(scenario: Scenario, plan: ParallelPlan) -> int:
    """Returns what a split keeps in the memory of a node."""
    found = evaluate(scenario, Candidates.from_plans((plan,)), scenario_calibration(scenario))
    return int(found.host_bytes[0])
