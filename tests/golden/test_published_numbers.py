"""Every published figure is reproduced by the product's own functions."""

import golden_recompute as recomputed
import pytest
from golden_render import DOCUMENT, render

NUMBERS, MODELS = recomputed.load_numbers()


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: n.id)
def test_recomputes_published_figure(number: recomputed.Number) -> None:
    computed = recomputed.recompute(number, MODELS)
    assert computed == pytest.approx(number.value, rel=number.rel_tol, abs=0.0)


def test_every_entry_is_complete_and_used_once() -> None:
    ids = [n.id for n in NUMBERS]
    assert len(ids) == len(set(ids)) >= 30
    assert set(recomputed.RECOMPUTE) == {n.id for n in NUMBERS if not n.model}
    assert {n.model for n in NUMBERS if n.model} == set(MODELS)
    assert all(n.source and n.how and n.what for n in NUMBERS)
    assert all(0 <= n.rel_tol <= 0.015 for n in NUMBERS)


def test_stage_bytes_add_up_to_the_cluster() -> None:
    """Sixteen stages times the ranks that share them hold what the model has, plus copies."""
    plan_stages = recomputed.stage_bytes(recomputed.LAST_LIGHT)
    assert max(plan_stages) - min(plan_stages) > 5e9  # the mean alone would hide this
    heavy = recomputed.stage_bytes(recomputed.FIRST_HEAVY)
    assert sum(plan_stages) == sum(heavy)


def test_page_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), (
        "run: python tests/golden/golden_render.py"
    )


def test_the_kernels_stretch_the_dimensions_that_are_published() -> None:
    from flopwright.kernels.rope.frequencies import inverse_frequencies
    from flopwright.spec.model import MlaAttention, Rope

    attention = recomputed.K2.attention
    assert isinstance(attention, MlaAttention)
    rope, width = attention.rope, attention.qk_rope_head_dim
    plain = inverse_frequencies(Rope(theta=rope.theta), width)
    stretched = inverse_frequencies(rope, width)
    assert rope.scaling is not None
    assert (stretched[:20] == plain[:20]).all()  # up to and with 19
    assert stretched[20:] == pytest.approx(plain[20:] / rope.scaling.factor)
