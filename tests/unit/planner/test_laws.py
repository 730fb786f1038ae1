"""Scaling laws against closed forms, brute force and the figures their papers print."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from flopwright.planner import laws
from flopwright.planner.laws import HOFFMANN, REFIT, LossLaw, Run


@pytest.mark.parametrize("law", [REFIT, HOFFMANN], ids=lambda law: law.name)
@pytest.mark.parametrize("flops", [1e18, 5.76e23, 1e26])
def test_the_optimum_is_where_scipy_finds_it(law: LossLaw, flops: float) -> None:
    """Oracle: minimise L(N, C / 6N) over ln N numerically; then the Lagrangian's condition."""
    found = minimize_scalar(
        lambda x: law.loss(math.exp(x), flops / 6 / math.exp(x)),
        bracket=(math.log(1e6), math.log(1e12)),
        options={"xtol": 1e-12},
    )
    params, tokens = law.optimum(flops)
    assert params == pytest.approx(math.exp(found.x), rel=1e-3)
    assert 6 * params * tokens == pytest.approx(flops, rel=1e-12)
    pull_n = law.alpha * law.a / params**law.alpha
    pull_d = law.beta * law.b / tokens**law.beta
    assert pull_n == pytest.approx(pull_d, rel=1e-9)


def test_gophers_budget_by_both_sets_of_constants() -> None:
    """Chinchilla was 70B on 1.4T tokens: the refit says so, the rounded constants do not."""
    params, tokens = REFIT.optimum(5.76e23)
    assert params == pytest.approx(7.2e10, rel=0.01)
    assert tokens == pytest.approx(1.33e12, rel=0.01)
    assert tokens / params == pytest.approx(18, abs=0.5)
    params, tokens = HOFFMANN.optimum(5.76e23)
    assert tokens / params == pytest.approx(93, abs=0.5)


@given(st.floats(1e15, 1e28), st.floats(1.01, 10))
def test_more_compute_asks_more_of_both_and_loses_less(flops: float, factor: float) -> None:
    (n, d), (n2, d2) = REFIT.optimum(flops), REFIT.optimum(flops * factor)
    assert n2 > n
    assert d2 > d
    assert REFIT.loss(n2, d2) < REFIT.loss(n, d)


def test_the_flat_range_ends_where_the_loss_is_so_much_worse() -> None:
    flops, nats = 1e22, 0.005
    best = REFIT.loss(*REFIT.optimum(flops))
    low, high = REFIT.flat_range(flops, nats)
    assert low < REFIT.optimum(flops)[0] < high
    for edge in (low, high):
        assert REFIT.loss(edge, flops / 6 / edge) - best == pytest.approx(nats, rel=1e-6)


def test_sparsity_is_the_published_points_and_falls_between_them() -> None:
    published = {8: 1.69, 16: 1.39, 32: 1.15, 48: 1.0}
    for sparsity, flops in published.items():
        assert laws.sparsity_flops(sparsity) == pytest.approx(flops)
    values = [laws.sparsity_flops(s) for s in np.linspace(8, 48, 30)]
    assert all(a > b for a, b in itertools.pairwise(values))  # type: ignore[operator]
    assert laws.sparsity_flops(4) is None
    assert laws.sparsity_flops(56) is None


@pytest.mark.parametrize(
    ("layers", "hidden", "rate", "batch"),
    [(30, 4096, 4.2e-4, 2304 * 4096), (95, 8192, 3.2e-4, 4608 * 4096)],
    ids=["7b", "67b"],
)
def test_deepseeks_own_models_follow_their_law(
    layers: int, hidden: int, rate: float, batch: float
) -> None:
    """Rates and batches that arXiv 2401.02954 trained with, M = 72 l d^2 + 12 l d s."""
    per_token = 72 * layers * hidden**2 + 12 * layers * hidden * 4096
    found = laws.deepseek_law(Run(params=1, tokens=2e12, flops_per_token=per_token))
    assert found.learning_rate == pytest.approx(rate, rel=0.03)
    assert found.batch_tokens == pytest.approx(batch, rel=0.1)


def test_step_law_at_one_billion_weights_and_a_hundred_billion_tokens() -> None:
    """By hand, in logarithms of ten."""
    found = laws.step_law(Run(params=1e9, tokens=1e11, flops_per_token=6e9))
    rate = 10 ** (math.log10(1.79) - 9 * 0.713 + 11 * 0.307)
    assert found.learning_rate == pytest.approx(rate)
    assert found.batch_tokens == pytest.approx(0.58 * 10 ** (11 * 0.571))
    assert found.inside
    assert not laws.step_law(Run(params=1e12, tokens=1e13, flops_per_token=6e12)).inside


@pytest.mark.parametrize("rows", [laws.MOONLIGHT_ROWS, laws.KIMI_LINEAR_ROWS])
def test_power_laws_pass_near_their_tables(rows: tuple[laws.Row, ...]) -> None:
    """And equal numpy's least squares in the logarithms."""
    dense = rows is laws.MOONLIGHT_ROWS
    law, sequence = (laws.moonlight_law, 8192) if dense else (laws.kimi_linear_law, 4096)
    x = np.log([6 * n * d for n, d, _, _ in rows])
    for at, (params, tokens, rate, batch) in enumerate(rows):
        found = law(Run(params=params, tokens=tokens, flops_per_token=6 * params))
        assert found.inside
        assert found.learning_rate == pytest.approx(rate, rel=0.02)
        # The tables round batches to multiples of 16 or 32 sequences.
        assert found.batch_tokens == pytest.approx(batch, abs=16 * sequence)
        line = np.polyval(np.polyfit(x, np.log([r[2] for r in rows]), 1), x[at])
        assert found.learning_rate == pytest.approx(math.exp(line))


def test_the_first_law_is_the_one_of_the_runs_kind() -> None:
    run = Run(params=1e9, tokens=1e11, flops_per_token=6e9)
    first = [
        laws.hyperparameters(run, kind, moe=moe)[0].law  # type: ignore[arg-type]
        for kind, moe in (("adamw", False), ("muon", False), ("muon", True))
    ]
    assert first == ["step_law", "moonlight", "kimi_linear"]


@pytest.mark.parametrize(
    ("body", "hidden", "by_flops", "by_derivative"),
    [(3e9, 3200, 39e3, 43e3), (7e9, 4096, 62e3, 67e3), (70e9, 8192, 212e3, 231e3)],
)
def test_vocabularies_of_the_papers_table(
    body: float, hidden: int, by_flops: float, by_derivative: float
) -> None:
    found = [v / hidden for v in laws.vocabulary_params(body)]
    assert found == pytest.approx([by_flops, by_derivative], rel=0.015)


@given(st.floats(1_000, 190_000), st.floats(1.01, 2))
def test_larger_vocabularies_take_fewer_tokens(vocabulary: float, factor: float) -> None:
    larger = laws.tokens_per_character(vocabulary * factor)
    assert 0 < larger < laws.tokens_per_character(vocabulary) or vocabulary * factor > 200_000
    assert laws.tokens_per_character(1e6) == laws.tokens_per_character(200_000)
