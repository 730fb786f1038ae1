"""Mixtures: shares to the sample, and an order that no plan and no resume changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.executor.data.batches import Dataset
from flopwright.executor.data.domains import BLOCK, chosen_weights, load_mixtures, quotas
from flopwright.executor.data.mixture import MixedDataset
from flopwright.executor.data.opening import open_data
from flopwright.executor.data.prepare import prepare_mixture
from flopwright.spec.load import load_scenario

WEIGHTS = st.lists(st.integers(1, 50), min_size=1, max_size=5)


def mixed(weights: list[int], seed: int = 0, batch: int = 24, seq: int = 4) -> MixedDataset:
    """Domain d has the tokens 1000 d .. 1000 d + its length."""
    shares = quotas({str(i): w for i, w in enumerate(weights)})
    meta: Any = None
    common: Any = {"folder": Path(), "meta": meta, "seq_len": seq, "seed": seed}
    common["global_batch_size"] = batch
    parts = tuple(
        Dataset(
            train=np.arange(100 + 37 * d, dtype=np.uint16) + 1000 * d,
            held_out=np.arange(50, dtype=np.uint16) + 1000 * d,
            **common,
        )
        for d in range(len(weights))
    )
    return MixedDataset(parts=parts, shares=tuple(shares.values()), **common)


@given(WEIGHTS)
def test_quotas_are_the_weights_within_one_sample(weights):
    shares = quotas({str(i): float(w) for i, w in enumerate(weights)})
    assert sum(shares.values()) == BLOCK
    for i, weight in enumerate(weights):
        assert abs(shares[str(i)] - BLOCK * weight / sum(weights)) < 1


@settings(max_examples=20)
@given(WEIGHTS, st.integers(0, 5), st.integers(0, 3))
def test_every_sample_of_every_domain_comes_once_in_order(weights, seed, blocks):
    data = mixed(weights, seed)
    domains, places = data.places(np.arange((blocks + 1) * BLOCK))
    for domain, share in enumerate(data.shares):
        assert (domains == domain).sum() == share * (blocks + 1)
        assert places[domains == domain].tolist() == list(range(share * (blocks + 1)))


@settings(max_examples=40)
@given(
    WEIGHTS,
    st.integers(0, 200),
    st.sampled_from([(1, 1), (1, 24), (2, 3), (4, 6), (3, 4), (8, 1)]),
)
def test_the_order_is_the_same_under_every_plan_and_from_any_step(weights, step, plan):
    """The batch of a step, asked for alone, is that of whoever reads it in parts."""
    dp, micro = plan
    data = mixed(weights)
    whole = data.batch(step)
    ranks = [data.rank_slice(step, rank, dp, micro) for rank in range(dp)]
    assert np.array_equal(np.stack(ranks, 1).reshape(whole.shape), whole)
    domains, places = data.places(np.arange(step * 24, step * 24 + 24))
    for row, domain, place in zip(whole, domains, places, strict=True):
        assert np.array_equal(row, data.parts[domain].samples(np.array([place]))[0])
        assert set(row // 1000) == {domain}


def test_blocks_differ_from_each_other_and_between_seeds():
    orders = [mixed([1, 1], seed).places(np.arange(2 * BLOCK))[0] for seed in (0, 1)]
    assert not np.array_equal(orders[0][:BLOCK], orders[0][BLOCK:])
    assert not np.array_equal(orders[0], orders[1])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("abcd " * 2000)
    (tmp_path / "b.txt").write_text("wxyz " * 2000)
    path = tmp_path / "domains.yaml"
    path.write_text(
        "domains:\n  left: a.txt\n  right: b.txt\n"
        "mixtures:\n  base: {left: 1, right: 3}\n  anneal: {left: 1, right: 1}\n"
    )
    return path


def test_prepared_domains_are_read_by_the_workloads_mixture(file, tmp_path):
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    workload = scenario.workload.model_copy(update={"mixture": "base", "seq_len": 8})
    prepare_mixture(file, scenario.model, tmp_path / "data", "characters")
    data = open_data(file, tmp_path / "data", workload, scenario.model.vocab_size)
    tokenizer = data.parts[0].tokenizer()
    text = [tokenizer.decode(row) for step in range(50) for row in data.batch(step)]
    left = sum("a" in t or "b" in t or "c" in t for t in text)
    assert left == (data.places(np.arange(len(text)))[0] == 0).sum()
    assert abs(left / len(text) - 0.25) < 0.06
    anneal = open_data(file, tmp_path / "data", workload.model_copy(update={"mixture": "anneal"}))
    assert anneal.shares == (500, 500)
    assert {len(r) for r in data.held_out_sequences(8)} == {9}


@pytest.mark.parametrize(
    ("mixtures", "said"),
    [
        ("{base: {middle: 1}}", "which is no domain"),
        ("{base: {left: 0}}", "weighs nothing"),
        ("{base: {left: 1, right: 5000}}", "below 1 in 1000"),
    ],
)
def test_files_that_make_no_sense_are_refused(file, mixtures, said):
    file.write_text(f"domains: {{left: a.txt, right: b.txt}}\nmixtures: {mixtures}\n")
    with pytest.raises(InputError, match=said):
        load_mixtures(file)


def test_a_mixture_has_to_be_named_where_there_are_several(file):
    mixtures = load_mixtures(file)
    for name, said in ((None, "base, anneal"), ("anneall", "anneal")):
        with pytest.raises(InputError, match=said):
            chosen_weights(mixtures, name, file)


@pytest.mark.parametrize("name", ["../../evil", "/tmp/x", "", "a b", ".hidden"])
def test_names_of_domains_are_names_of_folders_and_nothing_more(file, name):
    file.write_text(f"domains: {{{name!r}: a.txt}}\nmixtures: {{base: {{{name!r}: 1}}}}\n")
    with pytest.raises(InputError, match="domains"):
        load_mixtures(file)
