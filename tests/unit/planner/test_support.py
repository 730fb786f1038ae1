"""`support` against counting the published files and the curve files by hand."""

from collections import Counter
from functools import cache

import pytest

from flopwright.errors import InputError
from flopwright.executor.launch.supported import refused_fields, unsupported
from flopwright.plan.file import PlanFile
from flopwright.planner.support import support
from flopwright.planner.support_answer import Support
from flopwright.planner.support_plan import executor_runs, target_states
from flopwright.simulator.accuracy.published_files import FOLDER
from flopwright.spec.load import load_model
from flopwright.spec.yaml_lines import read_yaml


def judge(plan: PlanFile) -> tuple[list[str], frozenset[str]]:
    return [f"{v.field} {v.value}" for v in unsupported(plan)], refused_fields(plan)


@cache
def _files() -> list[dict[str, object]]:
    """The published files as plain data, read past the code under test."""
    return [read_yaml(path).data for path in sorted(FOLDER.glob("*.yaml"))]


@cache
def _llama_on_h100() -> Support:
    return support(judge, "llama31_70b", "H100 SXM", "NeMo")


@pytest.mark.slow
def test_counts_equal_the_published_files() -> None:
    found = _llama_on_h100()
    files = _files()
    gpus = Counter(f["gpu"] for f in files)
    frameworks = Counter(f["stack"]["framework"] for f in files)  # type: ignore[index]
    assert {c.name: c.runs for c in found.gpus if c.runs} == gpus
    assert {c.name: c.runs for c in found.frameworks if c.runs} == frameworks
    parts = {c.name: c.runs for c in found.by_part}
    assert parts["GPU h100_sxm"] == gpus["h100_sxm"]
    assert parts["framework nemo"] == frameworks["nemo"]


@pytest.mark.slow
def test_tested_means_runs_that_share_all_of_it() -> None:
    found = _llama_on_h100()
    by_hand = {
        f["id"]
        for f in _files()
        if f["gpu"] == "h100_sxm"
        and f["stack"]["framework"] == "nemo"  # type: ignore[index]
        and f["model"]["num_layers"] == 80  # type: ignore[index]
        and f["model"]["hidden_size"] == 8192  # type: ignore[index]
    }
    assert found.verdict == "tested"
    assert by_hand
    assert {t.id for t in found.tested} == by_hand
    assert all(t.url for t in found.tested)
    assert all(s.name.startswith("nemo-") and s.spread80 > 1 for s in found.stacks)


def test_borrowed_curves_are_assumed() -> None:
    found = support(judge, "kimi_k2", "h800_sxm")
    assert found.verdict == "assumed"
    assert found.gpu is not None
    assert not found.gpu.own
    assert "h100_sxm" in found.answer
    measured = _llama_on_h100().gpu
    assert measured is not None
    assert measured.own
    assert not measured.missing
    assert sum(c.points for c in measured.curves) > 10_000


def test_a_stack_fitted_to_dense_models_does_not_cover_experts() -> None:
    found = support(judge, "deepseek_v3", "h100_sxm", "torchtitan")
    assert found.verdict == "assumed"
    assert not found.stacks
    assert support(judge, "llama31_8b", "h100_sxm", "fsdp").stacks


def test_every_unknown_name_is_told_at_once() -> None:
    with pytest.raises(InputError) as caught:
        support(judge, "llama31_9b", "h900", "megatorn")
    fixes = {v.field: v.nearest_fix for v in caught.value.violations}
    assert fixes["--model"] == "did you mean 'llama31_8b'?"
    assert "gh200" in fixes["--gpu"] or "h200" in fixes["--gpu"]
    assert fixes["--framework"] == "did you mean 'megatron'?"


def test_targets_are_tried_not_claimed() -> None:
    llama = {t.name: t for t in target_states(load_model("llama31_8b"), "h100_sxm")}
    assert llama["torchtitan"].works
    assert "zero3" in llama["torchtitan"].plan
    assert llama["megatron"].works
    mini = {t.name: t for t in target_states(load_model("kimi_k2_mini"), "h100_sxm")}
    assert not mini["torchtitan"].works
    assert "flavor" in mini["torchtitan"].refused


def test_the_executor_says_what_it_refuses() -> None:
    runs = executor_runs(load_model("llama31_8b"), "h100_sxm", judge)
    assert runs.works
    assert "parallel.tp" in runs.fields
    deepseek = load_model("deepseek_v3").model_copy(update={"mtp_layers": 1})
    found = executor_runs(deepseek, None, judge)
    assert found.works
    assert "model.mtp_layers" in found.fields
    told = executor_runs(deepseek, None, lambda plan: ([f"{plan.parallel.tp} is too few"], ()))
    assert not told.works
    assert told.refused == ("1 is too few",)
