"""A probe goes on where it was ended, spends spare time where it is unsure, names slow parts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from flopwright.executor.measure.fingerprint import fingerprint
from flopwright.executor.measure.probe_cases import linear_case
from flopwright.executor.measure.probe_design import by_information
from flopwright.executor.measure.probe_links import pairs_of
from flopwright.executor.measure.probe_plain import quantize_case
from flopwright.executor.measure.probe_reference import cut_down, reference_plans
from flopwright.executor.measure.probe_request import torchrun_words
from flopwright.executor.measure.probe_storage import storage_points
from flopwright.executor.measure.probe_timing import Ranks
from flopwright.executor.measure.probe_units import Journal, Unit, merged, run_units
from flopwright.ops import OpKind
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.probe import LinkPoint, OperatorPoint, ProbePart, ProbeReport, RankSpeed
from flopwright.spec.load import load_scenario, make_plan_file

RANKS = Ranks(torch.device("cpu"))


def point(seconds: float, repeats: int = 4, p90: float = 2.0) -> OperatorPoint:
    return OperatorPoint(
        kind="gemm", name="linear", dtype="fp32", seconds=seconds, seconds_min=seconds / 2,
        seconds_p90=seconds * p90, repeats=repeats,
    )  # fmt: skip


def unit(key: str, calls: list[str], *, essential: bool = True, p90: float = 2.0) -> Unit:
    def run(_: float) -> ProbePart:
        calls.append(key)
        return ProbePart(operators=(point(1e-3, p90=p90),))

    return Unit(key, key, run, essential=essential)


def empty_report() -> ProbeReport:
    return ProbeReport(
        created="2026-01-02T03:04:05+00:00",
        fingerprint=fingerprint(4),
        host_floor_s=1e-6,
        operators=(),
    )


def quiet(_: str) -> None:
    """Says nothing."""


def test_a_probe_that_was_ended_measures_only_what_is_left(tmp_path: Path) -> None:
    journal, calls = Journal(tmp_path / "j", "head"), list[str]()
    units = [unit(key, calls) for key in "abc"]

    def broken(_: float) -> ProbePart:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_units([*units[:2], Unit("c", "c", broken)], RANKS, 0.0, quiet, journal)
    assert calls == ["a", "b"]
    found = run_units(units, RANKS, 0.0, quiet, Journal(tmp_path / "j", "head"))
    assert calls == ["a", "b", "c"]
    assert set(found) == {"a", "b", "c"}


def test_a_cut_line_ends_the_journal_and_another_machine_s_is_not_taken(tmp_path: Path) -> None:
    journal, calls = Journal(tmp_path / "j", "head"), list[str]()
    run_units([unit(key, calls) for key in "ab"], RANKS, 0.0, quiet, journal)
    text = journal.path.read_text() if journal.path else ""
    (tmp_path / "j").write_text(text[:-20])
    assert set(journal.parts()) == {"a"}
    assert Journal(tmp_path / "j", "another head").parts() == {}


def test_spare_time_goes_to_what_may_be_wrong_by_most() -> None:
    calls = list[str]()
    sure, unsure = unit("sure", calls, p90=1.001), unit("unsure", calls, p90=20.0)
    run_units([sure, unsure], RANKS, 0.02, quiet, Journal(None, ""))
    assert calls.count("unsure") > calls.count("sure") >= 1


def test_units_that_are_not_essential_are_left_out_once_the_time_is_up() -> None:
    calls = list[str]()
    units = [unit("a", calls), unit("b", calls, essential=False)]
    run_units(units, RANKS, -1.0, quiet, Journal(None, ""))
    assert calls == ["a"]


def test_two_measurements_are_one_weighed_by_repeats() -> None:
    one, two = (ProbePart(operators=(point(s, repeats=n),)) for s, n in ((1.0, 30), (4.0, 10)))
    (both,) = merged(one, two).operators
    assert both.seconds == pytest.approx(4**0.25)
    assert (both.seconds_min, both.repeats) == (0.5, 40)


def test_the_next_shape_is_the_one_that_is_furthest_from_those_known() -> None:
    known = [linear_case(256, 256, 256, "fp32")]
    grid = [linear_case(*s, "fp32", essential=False) for s in ((256, 256, 200), (2048, 16, 256))]
    first = by_information(known, grid)[0]
    assert float(first.rows.m[0, 0]) == 2048
    assert len(by_information(known, grid)) == 2


def test_pairs_cover_every_rank_and_links_across() -> None:
    assert pairs_of(4, 2) == list(itertools.combinations(range(4), 2))
    many = pairs_of(16, 8)
    assert {r for pair in many for r in pair} == set(range(16))
    assert (0, 8) in many


def test_slow_processors_and_links_are_named_among_their_kind() -> None:
    def link(a: int, b: int, seconds: float, *, within: bool) -> LinkPoint:
        return LinkPoint(ranks=(a, b), within_node=within, nbytes=2**20, seconds=seconds)

    report = empty_report().model_copy(
        update={
            "ranks": tuple(
                RankSpeed(rank=i, host=f"h{i}", local_rank=0, slowdown=s)
                for i, s in enumerate((1.0, 1.3, 0.98, 1.02))
            ),
            "links": (
                link(0, 1, 1.0, within=True),
                link(2, 3, 1.1, within=True),
                link(4, 5, 1.2, within=True),
                link(0, 2, 10.0, within=False),
                link(1, 3, 10.5, within=False),
                link(4, 6, 31.0, within=False),
            ),
        }
    )
    assert [r.host for r in report.slow_ranks()] == ["h1"]
    assert [x.ranks for x in report.slow_links()] == [(4, 6)]


def test_srun_s_words_become_torchrun_s() -> None:
    srun = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1",
            "SLURM_JOB_NUM_NODES": "2"}  # fmt: skip
    words = torchrun_words(srun)
    assert (words["RANK"], words["WORLD_SIZE"], words["LOCAL_RANK"]) == ("5", "8", "1")
    assert words["LOCAL_WORLD_SIZE"] == "4"
    assert torchrun_words({"RANK": "0", **srun}) == {}


def test_a_checkpoint_is_written_and_read_and_leaves_nothing(tmp_path: Path) -> None:
    found = storage_points(tmp_path, RANKS, 2**16).storage
    assert {p.what for p in found} == {"write", "read"}
    assert list(tmp_path.iterdir()) == []


def test_reference_steps_are_small_and_left_out_where_they_do_not_fit() -> None:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    plans = [
        make_plan_file(scenario, ParallelPlan(dp_shard=2, micro_batch_size=size), f"mb{size}")
        for size in (2, 8, 4)
    ]
    found = reference_plans(plans, 2, 2**33)
    assert [p.parallel.micro_batch_size for p in found] == [2, 8]
    assert {p.scenario.model.num_layers for p in found} == {2}
    assert cut_down(scenario.model).moe == scenario.model.moe
    assert reference_plans(plans, 2, 2**20) == []


def test_narrowing_is_timed_as_its_own_kind() -> None:
    case = quantize_case(64, 256, "fp32")
    assert case.rows.kind[0] == OpKind.QUANTIZE
    out = case.prepare(torch.device("cpu")).run()
    assert out.shape == (64, 256)
