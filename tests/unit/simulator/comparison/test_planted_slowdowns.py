"""What was made slow on purpose is named first: 20 runs of each kind, at most one missed."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest


def _cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "planted_cases", Path(__file__).with_name("planted_cases.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted_cases"] = module
    spec.loader.exec_module(module)
    return module


CASES = _cases()
KINDS = ("op_cases", "class_cases", "rank_cases", "link_cases", "memory_cases")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_named_first(kind: str) -> None:
    missed = []
    for case in getattr(CASES, kind)(20):
        causes = case.run()
        if not causes or not case.named_by(causes[0]):
            missed.append((case.label, [(c.kind, c.name, c.ranks) for c in causes[:2]]))
    assert len(missed) <= 1, missed


@pytest.mark.slow
def test_nothing_is_named_where_nothing_was_planted() -> None:
    named = []
    for case in CASES.clean_cases(20):
        causes = case.run()
        named += [(case.label, c.kind, c.name, c.sigmas) for c in causes]
    assert len(named) <= 1, named


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_each_kind(kind: str) -> None:
    (case,) = getattr(CASES, kind)(1)
    causes = case.run()
    assert case.named_by(causes[0])
    # and by how much: the factor is the planted one
    planted = {"link": 3.0, "memory": 1.2}.get(case.kind, 1.5)
    # transfers of a slow link also get into each other's way
    assert causes[0].factor == pytest.approx(planted, rel=0.2 if case.kind == "link" else 0.1)


def test_a_kernel_class_is_not_guessed_without_a_profile() -> None:
    """Forward and backward say that compute is slow; which kernels only a profiler sees."""
    (case,) = CASES.op_cases(1)
    causes = replace(case, kernels=False).run()
    assert all(c.kind != "kernel" for c in causes)
