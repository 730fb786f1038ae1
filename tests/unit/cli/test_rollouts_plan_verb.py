"""`flopwright rollouts` where it plans: search, campaign, trace, plan file, and its page."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from flopwright.cli import main
from flopwright.plan.loop import load_loop_plan
from flopwright.spec.load import CLUSTER_CATALOG, catalog_names
from flopwright.spec.loop import is_loop, load_loop_scenario, loop_scenario_from_text
from flopwright.spec.rollout import ROLLOUT_CATALOG

SMALL = "small_exponential_1gpu"
PAGE = Path(__file__).parents[3] / "docs" / "rollouts.md"
LOOPS = [name for name in catalog_names(ROLLOUT_CATALOG) if is_loop(name)]
SPLIT = """
kind: rl_loop
name: split
gpus: 8
train: {gpu_s_per_token: 0.0002, fixed: 1 s}
search:
  layout: [colocated, one_step_off, async]
  generation_share: [0.5]
  lambda: [0.8, 1]
  staleness_bound: [1]
rollout:
  name: split
  prompts: 16
  samples_per_prompt: 2
  prompt_tokens: 10
  lengths: {kind: lognormal, mean: 60, sigma: 0.8, cap: 400}
  decode: {per_step: 10 ms, per_attempt: 50 us}
  instances: 8
  rounds: 3
"""


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["rollouts", *args])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.mark.slow
def test_a_search_writes_plan_picture_and_trace(capsys, tmp_path):
    plan, png, trace = (tmp_path / n for n in ("loop.yaml", "loop.png", "round.json.gz"))
    args = ["--search", "--rounds", "2", "--out", plan, "--png", png, "--trace", trace]
    code, out, _ = run(capsys, SMALL, *map(str, args))
    assert code == 0
    for word in ("best: colocated", "what binds", "throughput against staleness", "assumed:"):
        assert word in out
    loaded = load_loop_plan(plan)
    assert loaded.predicted is not None
    assert loaded.predicted.attempts_per_s > 0
    assert png.read_bytes().startswith(b"\x89PNG")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {e["ph"] for e in events} >= {"M", "X", "C"}


def test_layouts_are_compared_on_one_front(capsys, tmp_path):
    file = tmp_path / "split.yaml"
    file.write_text(SPLIT)
    code, out, _ = run(capsys, str(file), "--json", "--top", "20")
    assert code == 0
    data = json.loads(out)
    assert data["complete"]
    assert {r["plan"]["layout"] for r in data["ranked"]} == {"colocated", "one_step_off", "async"}
    front = [
        (r["outcome"]["mean_staleness"], r["outcome"]["attempts_per_s"]) for r in data["front"]
    ]
    assert front == sorted(front)
    assert [y for _, y in front] == sorted(y for _, y in front)
    stale = {r["plan"]["layout"]: r["outcome"]["mean_staleness"] for r in data["ranked"]}
    assert stale["async"] <= 3
    assert "tail" in data["binds"]


def test_nothing_that_fits_is_exit_code_1(capsys, tmp_path):
    file = tmp_path / "none.yaml"
    goals = "  goals: {max_mean_staleness: 0.1}\n"
    file.write_text(SPLIT.replace("[colocated, one_step_off, async]", "[one_step_off]") + goals)
    code, out, _ = run(capsys, str(file), "--out", str(tmp_path / "plan.yaml"))
    assert code == 1
    assert "nothing fits" in out
    assert "goals.max_mean_staleness" in out
    assert not (tmp_path / "plan.yaml").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--out", "plan.yaml"], "add --search"),
        (["--time-limit", "3"], "add --search"),
        (["--top", "3"], "add --search"),
        (["--growth", "2"], "add --campaign"),
        (["--campaign", "--growth", "0"], "between 0.01 and 1000"),
        (["--campaign", "--rounds", "2"], "runs short"),
        (["--search", "--out", "plan.yml"], "is YAML"),
        (["--trace", "round.txt"], "is JSON"),
        (["--trace", "nowhere/round.json"], "no such folder"),
    ],
)
def test_wrong_input_is_told(capsys, monkeypatch, tmp_path, args, words):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, SMALL, *args)
    assert code == 2
    assert words in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_that_ships_loads_and_says_its_sources(name):
    loop = load_loop_scenario(name)
    assert loop.name == name == loop.rollout.name
    assert loop.sources
    assert loop.num_gpus == 256
    assert loop.train is not None
    assert loop.train.model is not None  # the update is priced, not stated
    for unpublished in ("prompts", "samples_per_prompt", "lambda", "lengths"):
        assert loop.sources[unpublished].startswith("assumed")


def test_the_engine_may_be_left_out_only_where_serve_says_what_generates():
    text = SPLIT.replace("  decode: {per_step: 10 ms, per_attempt: 50 us}\n", "")
    with pytest.raises(Exception, match=r"give serve, or rollout\.decode"):
        loop_scenario_from_text(text)


def test_the_page_names_every_option_scenario_and_axis():
    page = PAGE.read_text(encoding="utf-8")
    cli = Path(__file__).parents[3] / "flopwright/cli/_rollout_options.py"
    options = set(re.findall(r'"(--[a-z-]+)"', cli.read_text("utf-8")))
    assert len(options) > 12
    assert options <= set(re.findall(r"--[a-z-]+", page))
    for name in catalog_names(ROLLOUT_CATALOG):
        assert name in page
    search = load_loop_scenario(LOOPS[0]).search
    for field, info in type(search).model_fields.items():
        assert (info.alias or field) in page


@pytest.mark.slow
def test_the_pages_own_scenario_is_planned_as_it_stands(capsys, tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(kind: rl_loop\n.*?)```", page, re.DOTALL)
    file = tmp_path / "my_loop.yaml"
    file.write_text(text)
    code, out, err = run(capsys, str(file), "--json")
    assert code == 0, err
    data = json.loads(out)
    assert data["complete"]
    assert data["ended_early"] == []
    assert data["ranked"][0]["plan"]["update"]["parallel"]
    assert data["ranked"][0]["plan"]["memory"]


def test_the_page_lists_every_cluster():
    page = PAGE.read_text(encoding="utf-8")
    for name in catalog_names(CLUSTER_CATALOG):
        if name != "local_2cpu":  # no loop runs on it
            assert f"`{name}`" in page


def test_fields_are_changed_for_rounds_and_loops(capsys, tmp_path):
    file = tmp_path / "split.yaml"
    file.write_text(SPLIT)
    changes = ["--set", "rollout.prompts=8", "--set", "search.layout=[async]"]
    changes += ["--set", "search.elastic=[true]", "--set", "search.staleness_bound=[0, 1]"]
    code, out, _ = run(capsys, str(file), *changes, "--json")
    assert code == 0
    data = json.loads(out)
    assert {r["plan"]["layout"] for r in data["ranked"]} == {"async"}
    assert {r["outcome"]["iteration"]["completed"] for r in data["ranked"]} == {16}
    assert all("elastic" in r["words"] for r in data["ranked"])
    assert all(r["plan"]["hand_over"]["lent_gpus"] == 4 for r in data["ranked"])
    args = (SMALL, "--rounds", "1", "--set", "prompts=4", "--set", "lengths.mean=50", "--json")
    code, out, _ = run(capsys, *args)
    assert code == 0
    assert json.loads(out)["report"]["attempts_in_flight"] == 16


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--set", "promts=4"], "prompts"),
        (["--set", "lengths.mean=-3"], "lengths.mean"),
        (["--set", "name.first=x"], "holds no fields"),
        (["--set", "prompts"], "FIELD=VALUE"),
        (["--campaign", "--search"], "kind rollout"),
        (["--search", "--sweep"], "leave it out"),
        (["--campaign", "--trace", "t.json"], "leave --campaign out"),
    ],
)
def test_wrong_changes_and_options_that_change_nothing_are_told(capsys, args, words):
    code, _, err = run(capsys, SMALL, *args)
    assert code == 2
    assert words in err


def test_all_that_is_wrong_with_the_options_is_told_at_once(capsys):
    code, _, err = run(capsys, SMALL, "--out", "p.yaml", "--time-limit", "3", "--growth", "2")
    assert code == 2
    assert all(flag in err for flag in ("--out", "--time-limit", "--growth"))


def test_a_bound_on_staleness_holds_for_a_loop_too(capsys, tmp_path):
    file = tmp_path / "split.yaml"
    file.write_text(SPLIT)
    code, out, _ = run(capsys, str(file), "--max-staleness", "0.3", "--json")
    assert code == 0
    assert all(r["outcome"]["mean_staleness"] <= 0.3 for r in json.loads(out)["ranked"])
