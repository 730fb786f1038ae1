"""Levels and folds on runs made from known scalars."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.ops import Array
from flopwright.simulator.accuracy.crossval import held_out, predicted
from flopwright.simulator.accuracy.fit_levels import Design, Term, design, fit_levels, unlinked
from flopwright.simulator.accuracy.fit_step import (
    COMMS,
    ENDS,
    KERNELS,
    SLOTS,
    StepArrays,
    step_seconds,
)

STACKS = ("a", "b", "c", "d", "e", "f")
TERMS = (
    Term(level="kernel", slots=("x gemm",), by="", std=0.3),
    Term(level="stack", slots=tuple(f"x {k}" for k in KERNELS), by="stack", std=0.2),
    Term(level="host", slots=("s host dense",), by="", std=0.5),
    Term(level="hidden", slots=("hide tp_comm",), by="", std=1.0),
)


def base() -> Array:
    values = np.array([1.0 if n.startswith("x") else 0.5 if n[0] == "h" else 1e-3 for n in SLOTS])
    return unlinked(values)


def runs(per_stack: int, seed: int = 1) -> tuple[StepArrays, list[dict[str, str]]]:
    rng = np.random.default_rng(seed)
    count = per_stack * len(STACKS)
    kernel = np.zeros((count, 1, len(KERNELS)))
    kernel[:, 0, 0] = rng.uniform(0.05, 0.5, count)
    comm = np.zeros((count, 1, len(COMMS)))
    comm[:, 0, 0] = rng.uniform(0.0, 0.1, count)
    arrays = StepArrays(
        kernel=kernel,
        comm=comm,
        layers=np.full((count, 1, 2), [32.0, 0.0]),
        chunks=np.ones((count, 1, 1)),
        microbatches=rng.integers(1, 16, count).astype(float),
        pp=np.ones(count),
        vpp=np.ones(count),
        hop=np.zeros(count),
        end=np.zeros((count, 1, len(ENDS))),
        forward=np.zeros(count),
        backward=np.zeros(count),
        norm=np.zeros(count),
        dp_ranks=np.zeros(count),
        correction=np.ones(count),
    )
    return arrays, [
        {"stack": STACKS[i % len(STACKS)], "cell": f"cell {i % 18}"} for i in range(count)
    ]


def with_theta(plan: Design, **given: float) -> Array:
    theta = np.zeros(len(plan.names))
    for name, value in given.items():
        theta[plan.names.index(name.replace("_", "|"))] = value
    return theta


def test_scalars_that_made_the_runs_are_found() -> None:
    arrays, labels = runs(20)
    plan = design(TERMS, labels, base())
    truth = with_theta(plan, stack_a=0.2, stack_b=-0.1, stack_c=0.05, hidden_=1.0, host_=0.5)
    measured = step_seconds(arrays, plan.values(truth))[0]
    fit = fit_levels(plan, arrays, measured, np.ones(len(labels)), sigma=0.003)
    found = fit.posterior.theta
    names = [n for n in plan.names if n.startswith("stack|")]
    got = {n: found[plan.names.index(n)] for n in names}
    # the level that all stacks share may move into the kernel's term, as their priors weigh
    assert got["stack|a"] - got["stack|b"] == pytest.approx(0.3, abs=0.01)
    assert got["stack|c"] - got["stack|d"] == pytest.approx(0.05, abs=0.01)
    assert found[plan.names.index("hidden|")] == pytest.approx(1.0, abs=0.1)
    assert predicted(fit, arrays, np.arange(len(labels)))[0] == pytest.approx(
        np.log(measured), abs=0.003
    )


def test_the_jacobian_is_the_numerical_one() -> None:
    arrays, labels = runs(2)
    plan = design(TERMS, labels, base())
    theta = np.random.default_rng(0).normal(0, 0.2, len(plan.names))
    _, slope = plan.log_steps(theta, arrays)
    for p in range(len(theta)):
        move = np.zeros(len(theta))
        move[p] = 1e-6
        up, down = (plan.log_steps(theta + s * move, arrays)[0] for s in (1, -1))
        assert slope[:, p] == pytest.approx((up - down) / 2e-6, abs=1e-6), plan.names[p]


def test_a_stack_never_seen_is_predicted_by_the_mean_with_the_spread_of_stacks() -> None:
    arrays, labels = runs(10)
    plan = design(TERMS, labels, base())
    truth = with_theta(plan, stack_a=0.2, stack_b=-0.2)
    measured = step_seconds(arrays, plan.values(truth))[0]
    weights = np.ones(len(labels))
    whole = fit_levels(plan, arrays, measured, weights, sigma=0.01)
    found = held_out(whole, arrays, measured, weights, [r["stack"] for r in labels])
    of_a = np.array([r["stack"] == "a" for r in labels])
    errors = np.log(measured) - found.log_s
    assert np.median(errors[of_a]) == pytest.approx(0.2, abs=0.06)
    assert found.log_std[of_a].max() < 0.25
    assert found.log_std[of_a].min() > 0.1
    by_cell = held_out(whole, arrays, measured, weights, [r["cell"] for r in labels])
    assert np.abs(np.log(measured) - by_cell.log_s).max() < 0.02
    assert by_cell.log_std.max() < 0.1


def test_a_fold_never_sees_its_own_runs() -> None:
    arrays, labels = runs(4)
    plan = design(TERMS, labels, base())
    measured = step_seconds(arrays, plan.values(with_theta(plan)))[0]
    weights = np.ones(len(labels))
    folds = [r["cell"] for r in labels]
    changed = measured.copy()
    changed[np.array(folds) == "cell 3"] *= 1.7
    first, second = (
        held_out(fit_levels(plan, arrays, m, weights, 0.05), arrays, m, weights, folds)
        for m in (measured, changed)
    )
    mine = np.array(folds) == "cell 3"
    assert first.log_s[mine] == pytest.approx(second.log_s[mine], abs=1e-4)
    assert np.abs(first.log_s[~mine] - second.log_s[~mine]).max() > 1e-3
