"""Each page of the dashboard: no exception, its charts, its empty and error states."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("plotly")
testing = pytest.importorskip("streamlit.testing.v1")

from flopwright.dashboards.compare_figures import over_time_figure  # noqa: E402
from flopwright.dashboards.exported import made_bundle  # noqa: E402
from flopwright.dashboards.runs import calibrations, compared_runs  # noqa: E402
from flopwright.dashboards.tables import as_markdown  # noqa: E402
from flopwright.dashboards.uploads import (  # noqa: E402
    uploaded_cluster,
    uploaded_model,
    uploaded_scenario,
)
from flopwright.errors import InputError  # noqa: E402
from flopwright.planner.plan_text import plan_from_text  # noqa: E402
from flopwright.planner.search import search  # noqa: E402
from flopwright.report.metrics import Fingerprint, Measurement  # noqa: E402
from flopwright.simulator.accuracy.named_stacks import scenario_calibration  # noqa: E402
from flopwright.spec.load import (  # noqa: E402
    CLUSTER_CATALOG,
    dump_yaml,
    load_cluster,
    load_scenario,
    make_plan_file,
)
from flopwright.store import open_store  # noqa: E402

MINI = "kimi_k2_mini_2cpu_fp32"
SMALL = "small_exponential_1gpu"
PAGES = Path(__file__).resolve().parents[2] / "dashboards" / "app_pages"


def open_page(name: str, **query: Any) -> Any:
    text = f"from flopwright.dashboards.app_pages.{name} import page\npage()"
    app = testing.AppTest.from_string(text, default_timeout=300)
    for key, value in query.items():
        app.query_params[key] = value
    return settled(app.run())


def settled(app: Any) -> Any:
    """The page once the work of other processes has ended: a browser would draw it by itself."""
    deadline = time.monotonic() + 300
    while any(b.label == "Stop" for b in app.button):
        assert time.monotonic() < deadline
        time.sleep(0.2)
        app.run()
    return app


def kept(app: Any, key: str) -> str:
    """The value of `key` in the page's address."""
    value = app.query_params[key]
    return str(value if isinstance(value, str) else value[0])


def commands(app: Any) -> list[str]:
    """The command lines under the charts."""
    start = "Command line: `` "
    found = [c.value for c in app.caption if c.value.startswith(start)]
    return [text.removeprefix(start).removesuffix(" ``") for text in found]


def charts(app: Any) -> int:
    return len(app.get("plotly_chart"))


def measured(name: str, slower: float) -> Measurement:
    """A measurement as a run of the mini's best plan would write it, `slower` than predicted."""
    scenario = load_scenario(MINI)
    best = search(scenario, top_k=1).ranked[0]
    metrics = best.prediction.metrics
    time_s = {k: v * slower for k, v in metrics.time_s.items()}
    step_s = sum(time_s.values())
    return Measurement(
        id=f"id-{name}",
        created="2026-01-01T00:00:00Z",
        plan_name=name,
        plan=make_plan_file(scenario, best.plan, name).to_data(),
        metrics=metrics.model_copy(update={"step_time_s": step_s, "time_s": time_s}),
        step_time_p10_s=step_s,
        step_time_p90_s=step_s,
        step_time_samples_s=(step_s,),
        discarded_steps=2,
        fingerprint=Fingerprint(
            machine="x86_64", processor="cpu", num_cores=2, world_size=2, threads_per_rank=1,
            memory_bytes=2**33, python="3.11", tool_version="0.1.0",
        ),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work starts at once: there is no browser that draws its page first."""
    monkeypatch.setattr("flopwright.dashboards.working.GRACE_S", 0.0)


@pytest.fixture
def fresh_views() -> Iterator[None]:
    """Scenarios are read anew in this test, and after it."""
    from flopwright.dashboards import view

    def forget() -> None:
        view._base.cache_clear()
        view._built.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLOPWRIGHT_HOME", str(tmp_path))
    monkeypatch.delenv("FLOPWRIGHT_STORE", raising=False)
    return tmp_path


@pytest.mark.slow
def test_explore_shows_verdict_plans_and_charts() -> None:
    app = open_page("explore", scenario=MINI)
    assert not app.exception
    assert app.success[0].value.startswith("**fits: kimi_k2_mini")
    assert charts(app) == 3
    table = app.dataframe[0].value
    assert list(table["rank"]) == sorted(table["rank"])
    assert all(any(u in c for u in ("(", "rank", "plan", "variants", "/s")) for c in table.columns)
    # the same numbers as the command line's functions
    scenario = load_scenario(MINI)
    best = search(scenario, scenario_calibration, refine=True).ranked[0]
    assert table["plan"][0] == best.plan.label()
    assert table["step time (s)"][0] == pytest.approx(
        best.prediction.metrics.step_time_s, rel=1e-3
    )
    assert commands(app) == [f"flopwright plan {MINI} --top {max(5, len(table))}"] * 3
    assert kept(app, "plan") == best.plan.label()


@pytest.mark.slow
def test_the_other_tabs_of_explore_are_reopened_by_their_address() -> None:
    app = open_page("explore", scenario=MINI, tab="What holds it back")
    assert not app.exception
    assert charts(app) == 1
    assert commands(app) == [f"flopwright explain {MINI}"]
    app = open_page("explore", scenario=MINI, tab="Serving", users=8)
    assert not app.exception
    assert charts(app) == 1
    assert any("1 GPU** holds it with its caches" in text.value for text in app.success)
    command = commands(app)[0]
    assert command.startswith("flopwright recommend --serve kimi_k2_mini --node hgx_h200")
    assert "--concurrency 8" in command
    app = open_page("explore", scenario="kimi_k2_mini_2cpu_fp32", tab="Scaling")
    assert not app.exception
    assert "no network" in app.info[0].value


@pytest.mark.slow
def test_explore_plans_what_the_address_changes() -> None:
    words = ["cluster=8_h100", "model=llama31_8b", "workload.seq_len=64"]
    app = open_page("explore", scenario=MINI, set=words)
    assert not app.exception
    assert "llama31_8b" in (app.success or app.warning or app.error)[0].value
    command = commands(app)[0]
    assert command.startswith(f"flopwright plan {MINI} --set cluster=8_h100 --set model=")
    # the controls show the changes, and a change of a control changes the address
    box = next(b for b in app.selectbox if b.label == "Cluster")
    assert box.value == "8_h100"
    box.select(box.options[0])  # in a form: sent when the form is
    next(b for b in app.button if b.label == "Plan").click().run()
    assert not app.exception
    assert app.query_params["set"] == ["model=llama31_8b", "workload.seq_len=64"]


@pytest.mark.slow
def test_two_scenarios_stand_side_by_side() -> None:
    app = open_page("explore", scenario=MINI, b_scenario="llama_mini_2cpu_fp32")
    assert not app.exception
    assert len(app.success) == 2
    assert charts(app) == 6
    assert kept(app, "scenario") == MINI
    assert kept(app, "b_scenario") == "llama_mini_2cpu_fp32"


@pytest.mark.slow
def test_a_change_that_cannot_be_is_said() -> None:
    app = open_page("explore", scenario=MINI, set="workload.seq_len=-5")
    assert not app.exception
    assert "cannot be planned" in app.error[0].value


@pytest.mark.slow
def test_the_plan_page_shows_a_plan_in_depth() -> None:
    words = "dp_shard=2 ep=2 zero_stage=1"
    app = open_page("plan", scenario=MINI, plan=words)
    assert not app.exception
    assert "fits" in app.success[0].value
    assert charts(app) == 1
    assert kept(app, "plan") == words
    assert f"flopwright simulate {MINI} --plan plan.yaml" in commands(app)[0]
    for part in ("Memory", "Communication"):
        app = open_page("plan", scenario=MINI, plan=words, part=part)
        assert not app.exception
        assert charts(app) == 1


@pytest.mark.slow
def test_the_plan_page_says_why_and_prices_an_edit() -> None:
    words = "dp_shard=2 ep=2 zero_stage=1"
    app = open_page("plan", scenario=MINI, plan=words, part="Why this plan")
    settled(next(b for b in app.button if "one choice away" in b.label).click().run())
    assert not app.exception
    assert charts(app) == 1
    assert len(app.dataframe[0].value) > 3
    app = open_page("plan", scenario=MINI, plan=words, part="Edit a field")
    box = next(n for n in app.number_input if "(ep)" in n.label)
    box.set_value(1)
    next(b for b in app.button if "edited" in b.label).click().run()
    assert not app.exception
    assert charts(app) == 1
    assert any("--also" in c for c in commands(app))
    edit = kept(app, "edit")
    assert "ep=" not in edit
    app = open_page("plan", scenario=MINI, plan=words, part="Edit a field", edit=edit)
    assert not app.exception
    assert charts(app) == 1


@pytest.mark.slow
def test_the_plan_page_says_every_rule_that_is_broken() -> None:
    app = open_page("plan", scenario=MINI, plan="tp=3 pp=5")
    assert not app.exception
    assert "cannot be priced" in app.error[0].value
    app = open_page("plan", scenario=MINI, plan="ppp=5")
    assert not app.exception
    assert "cannot be priced" in app.error[0].value


@pytest.mark.slow
def test_the_export_page_writes_what_the_verb_writes(tmp_path: Path) -> None:
    words = "dp_shard=2 zero_stage=1"
    app = open_page("export", scenario=MINI, plan=words, target=["skypilot", "accelerate"])
    assert not app.exception
    assert charts(app) == 2
    table = app.dataframe[0].value
    assert set(table["check"]) == {"passed"}
    assert {"plan.yaml", "torchrun.sh", "sbatch.sh", "deepspeed.json"} <= set(table["file"])
    assert (
        "flopwright export plan.yaml --to bundle --target skypilot --target accelerate "
        "--fallbacks 0"
    ) in commands(app)
    scenario = load_scenario(MINI)
    plan = plan_from_text(words, scenario)
    made = made_bundle(scenario, plan, ("accelerate", "skypilot"), None)
    (tmp_path / "plan.yaml").write_bytes(made.files["plan.yaml"])
    to = tmp_path / "bundle"
    names = ["--target", "accelerate", "--target", "skypilot", "--fallbacks", "0"]
    done = run_cli("export", str(tmp_path / "plan.yaml"), "--to", str(to), *names)
    assert done.returncode == 0, done.stderr
    assert {f.name: f.read_bytes() for f in to.iterdir()} == made.files


@pytest.mark.slow
def test_every_choice_counts_also_the_second() -> None:
    """A select box whose default follows the URL would lose every second choice."""
    app = open_page("explore", scenario=MINI)
    box = next(b for b in app.selectbox if b.label == "Plan")
    for choice in (box.options[1], box.options[2], box.options[0]):
        next(b for b in app.selectbox if b.label == "Plan").select(choice).run()
        assert kept(app, "plan") == choice
        assert not app.exception


@pytest.mark.slow
def test_a_link_reopens_a_plan_that_the_first_look_does_not_have() -> None:
    workload = load_scenario(MINI).workload.model_copy(update={"seq_len": 96})
    scenario = load_scenario(MINI).model_copy(update={"workload": workload})
    plan = search(scenario, scenario_calibration, 3).ranked[2].plan.label()
    app = open_page("explore", scenario=MINI, set="workload.seq_len=96", plan=plan)
    assert kept(app, "plan") == plan
    assert next(b for b in app.selectbox if b.label == "Plan").value == plan


def labelled(elements: Any, label: str) -> Any:
    return next(e for e in elements if label in e.label)


@pytest.mark.slow
def test_every_choice_counts_on_the_plan_and_export_pages() -> None:
    app = open_page("plan", scenario=MINI, plan="dp_shard=2 zero_stage=1")
    for words in ("dp_shard=2 ep=2", "dp_shard=1 pp=2", "dp_shard=2"):
        labelled(app.text_input, "Plan").set_value(words).run()
        assert kept(app, "plan") == words
    for name in ("llama_mini_2cpu_fp32", MINI, "llama_mini_2cpu_fp32"):
        labelled(app.selectbox, "Scenario").select(name).run()
        assert kept(app, "scenario") == name
    assert not app.exception
    app = open_page("export", scenario=MINI, plan="dp_shard=2 zero_stage=1")
    for targets, image in ((["accelerate"], "a/b:1"), (["megatron"], ""), ([], "a/b:2")):
        labelled(app.multiselect, "Further launchers").set_value(targets)
        labelled(app.text_input, "Container image").set_value(image)
        labelled(app.button, "Write the files").click().run()
        asked = commands(app)[0]
        assert asked.count("--target") == len(targets)
        assert all(f"--target {t}" in asked for t in targets)
        assert (f"--image {image}" in asked) is bool(image)
        assert ("image" in app.query_params) is bool(image)
    assert not app.exception


@pytest.mark.slow
def test_side_by_side_goes_on_and_off() -> None:
    app = open_page("explore", scenario=MINI)
    for wanted in (True, False, True):
        labelled(app.toggle, "side by side").set_value(wanted).run()
        assert labelled(app.toggle, "side by side").value is wanted
        assert ("b_scenario" in app.query_params) is wanted
    assert not app.exception


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "query"),
    [
        (
            "explore",
            {
                "scenario": MINI,
                "set": ["cluster=8_h100", "objective=headroom", "search.zero_stage=[1]"],
                "tab": "Serving",
                "users": 8,
                "node": "hgx_h100",
            },
        ),
        ("rollouts", {"rollout": SMALL, "lambda": "0.5"}),
    ],
)
def test_controls_start_by_their_defaults(name: str, query: dict[str, Any]) -> None:
    """A value that is set is told the browser once: a turn that is broken off would lose it."""
    app = open_page(name, **query)
    assert not app.exception
    for box in app.selectbox:
        assert box.options[box.proto.default] == box.value, box.label
    for box in (*app.number_input, *app.text_area, *app.text_input):
        assert box.proto.default == box.value, box.label
    for slider in app.slider:
        assert list(slider.proto.default) == [slider.value]
    boxes = (*app.selectbox, *app.number_input, *app.text_area, *app.text_input, *app.slider)
    assert boxes
    assert not [box.label for box in boxes if box.proto.set_value]


@pytest.mark.slow
def test_explore_says_what_is_lacking_when_nothing_fits(
    monkeypatch: pytest.MonkeyPatch, fresh_views: None
) -> None:
    scenario = load_scenario(MINI)
    gpu = scenario.cluster.node.gpu.model_copy(update={"hbm_bytes": 2**20})
    node = scenario.cluster.node.model_copy(update={"gpu": gpu})
    cluster = scenario.cluster.model_copy(update={"node": node})
    tiny = scenario.model_copy(update={"cluster": cluster})
    from flopwright.dashboards import view

    monkeypatch.setattr(view, "load_scenario", lambda name: tiny)
    app = open_page("explore", scenario=MINI)
    assert not app.exception
    assert app.error[0].value.startswith("**does not fit")
    assert charts(app) == 1
    table = app.dataframe[0].value
    assert (table["missing (GiB)"] > 0).all()
    assert "nearest fix" in table.columns


@pytest.mark.slow
def test_explore_shows_every_problem_of_a_scenario(
    monkeypatch: pytest.MonkeyPatch, fresh_views: None
) -> None:
    from flopwright.dashboards import view

    def broken(name: str) -> Any:
        return uploaded_scenario("mine.yaml", b"name: x\nmodell: kimi_k2\n")

    monkeypatch.setattr(view, "load_scenario", broken)
    app = open_page("explore", scenario=MINI)
    assert not app.exception
    assert "cannot be planned" in app.error[0].value
    assert "modell" in set(app.table[0].value["field"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"# " + b"x" * 1_000_001, "too large"),
        (b"name: x\nmodel: /etc/passwd.yaml\n", "cannot refer to files"),
        (b"name: x\ncluster: ../secret.yaml\n", "cannot refer to files"),
        (b"a: [", "not valid YAML"),
        (b"{" * 900_000, "nested too deeply"),
        (b"name: " + b"9" * 900_000, "name"),
        (b"!!python/object/apply:os.system ['ls']", "tag|not valid"),
        (b"\x00\x01", "not valid YAML"),
        (b"", "expected a mapping"),
    ],
)
def test_bad_uploads_are_refused(content: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        uploaded_scenario("mine.yaml", content)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model_type":"llama","num_hidden_layers":' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"model_type":"llama","num_hidden_layers":NaN}', "must be an integer"),
        (b"{", "not JSON"),
        (b"[1]", "is an object"),
        (b'{"model_type": "no_such"}', "model_type"),
        (b"{" + b" " * 1_000_001, "too large"),
    ],
)
def test_bad_configs_are_refused(content: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        uploaded_model("config.json", content)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"node: {gpu: ../secret.yaml}", "of the catalog"),
        (b"node: 5", "node"),
        (b"a: &a [1]\nb: [*a, *a]", "alias"),
    ],
)
def test_bad_clusters_are_refused(content: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        uploaded_cluster("cluster.yaml", content)


def test_a_shipped_cluster_can_be_uploaded() -> None:
    path = CLUSTER_CATALOG / "8_h100.yaml"
    assert uploaded_cluster("c.yaml", path.read_bytes()) == load_cluster("8_h100").to_data()


def test_a_dumped_scenario_can_be_uploaded() -> None:
    scenario = load_scenario(MINI)
    assert uploaded_scenario("mine.yaml", dump_yaml(scenario).encode()) == scenario


@pytest.mark.slow
def test_rollouts_follow_the_slider_and_the_sweep() -> None:
    app = open_page("rollouts", rollout=SMALL, **{"lambda": "0.8"})
    assert not app.exception
    assert charts(app) == 4
    assert app.slider[0].value == 0.8
    first = app.metric[0].value
    app.slider[0].set_value(0.5).run()
    assert app.metric[0].value != first
    assert kept(app, "lambda") == "0.5"
    app.slider[0].set_value(0.6).run()
    assert kept(app, "lambda") == "0.6"
    settled(next(b for b in app.button if "every lambda" in b.label).click().run())
    assert not app.exception
    assert charts(app) == 5
    assert "Best lambda" in app.success[0].value
    assert commands(app)[-1] == f"flopwright rollouts {SMALL} --sweep"


@pytest.mark.slow
def test_a_loop_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    from flopwright.dashboards import loop_view

    monkeypatch.setattr(loop_view, "SEARCH", {"rounds": 1, "zoom": False})
    app = open_page("rollouts", view="loop", loop="kimi_k2_rl_256gpu_h800")
    assert not app.exception
    assert charts(app) == 0
    app.number_input[0].set_value(5.0).run()
    assert kept(app, "seconds") == "5"
    settled(next(b for b in app.button if "Plan the loop" in b.label).click().run())
    assert not app.exception
    assert charts(app) == 3
    assert "attempts/s" in app.success[0].value
    assert "--search" in commands(app)[0]


@pytest.mark.slow
def test_a_box_for_files_stays_once_it_was_open() -> None:
    """A file that is on its way would be lost with the place it was dropped on."""
    app = open_page("rollouts", rollout=SMALL)
    boxes = []
    for lid in (None, True, False):
        if lid is not None:
            app.session_state["own round"] = lid
            app.run()
        assert not app.exception
        boxes.append(len(app.get("file_uploader")))
    assert boxes == [0, 1, 1]


@pytest.mark.slow
def test_a_strange_address_still_opens() -> None:
    app = open_page("rollouts", rollout="no such", view="other", **{"lambda": "much"})
    assert not app.exception
    assert charts(app) == 4


def test_compare_says_what_to_do_without_runs(home: Path) -> None:
    app = open_page("compare")
    assert not app.exception
    assert "No runs yet" in app.info[0].value
    assert "flopwright run" in app.code[0].value
    assert charts(app) == 0


@pytest.mark.slow
def test_compare_shows_runs(home: Path) -> None:
    open_store().add_all([measured("a", 1.1), measured("b", 1.4)])
    app = open_page("compare")
    assert not app.exception
    assert charts(app) == 2
    errors = app.dataframe[0].value.set_index("plan")["error (%)"].to_dict()
    assert errors == {"a": pytest.approx(-9.1, abs=0.05), "b": pytest.approx(-28.6, abs=0.05)}
    assert app.metric[0].label == "median error"
    app.text_input[0].set_value("b mini").run()
    assert not app.exception
    assert list(app.dataframe[0].value["plan"]) == ["b"]
    assert kept(app, "search") == "b mini"
    app.text_input[0].set_value("nowhere").run()
    assert not app.exception
    assert "No run holds" in app.warning[0].value


def offloaded(run: Measurement) -> Measurement:
    """A run whose plan needs a link to the host that its cluster does not have."""
    assert run.plan is not None
    plan = json.loads(json.dumps(run.plan))
    plan["parallel"] |= {"zero_stage": 1, "optimizer_offload": True}
    return run.model_copy(update={"plan": plan})


@pytest.mark.slow
def test_a_plans_runs_on_two_machines_are_two_lines() -> None:
    run = measured("a", 1.0)
    other = run.fingerprint.model_copy(update={"processor": "another"})
    there = {"fingerprint": other, "created": "2026-01-02T00:00:00Z", "id": "there"}
    later = {"created": "2026-01-03T00:00:00Z", "id": "later"}
    runs = [run.model_copy(update=later), run.model_copy(update=there), run]
    lines = over_time_figure(runs).data
    assert {line.name: list(line.x) for line in lines} == {
        "a, cpu": ["2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z"],
        "a, another": ["2026-01-02T00:00:00Z"],
    }
    assert [line.name for line in over_time_figure([run]).data] == ["a"]


@pytest.mark.slow
def test_compare_leaves_out_what_cannot_be_predicted_by_name(home: Path) -> None:
    open_store().add_all([measured("a", 1.1), offloaded(measured("old", 1.2))])
    app = open_page("compare")
    assert not app.exception
    assert list(app.dataframe[0].value["plan"]) == ["a"]
    assert "old" in app.warning[0].value
    assert "--exclude old" in commands(app)[0]


@pytest.mark.slow
def test_compare_shows_the_published_runs(home: Path) -> None:
    app = open_page("compare", tab="Published runs")
    next(b for b in app.button if "published" in b.label).click().run()
    assert not app.exception
    assert charts(app) == 1
    assert app.metric[0].label == "median error"


def test_a_small_table_is_markdown() -> None:
    rows = pd.DataFrame({"plan": ["a|b"], "step time (s)": [1.25], "variants": [3]})
    assert as_markdown(rows).splitlines() == [
        "| plan | step time (s) | variants |",
        "| --- | --: | --: |",
        "| a\\|b | 1.25 | 3 |",
    ]


def test_what_differs_between_two_machines_is_named() -> None:
    from flopwright.dashboards.compare_view import environment_rows

    one = measured("a", 1.0)
    where = one.fingerprint.model_copy(update={"num_cores": 4, "packages": {"torch": "2.14"}})
    other = one.model_copy(update={"fingerprint": where})
    assert environment_rows(one, one) == []
    assert environment_rows(one, other) == [
        {"": "num_cores", "first run": "2", "second run": "4"},
        {"": "torch", "first run": "-", "second run": "2.14"},
    ]


@pytest.mark.slow
def test_compare_shows_what_the_verb_prints(home: Path) -> None:
    """Before and after a calibration, with one run it did not learn from."""
    runs = [measured("a", 1.1), measured("b", 1.4), measured("c", 1.3)]
    open_store().add_all(runs)
    assert run_cli("calibrate", "--exclude", "c").returncode == 0
    app = open_page("compare")
    assert not app.exception
    learnt = kept(app, "calibration")
    done = run_cli("compare", "--calibration", learnt, "--json")
    assert commands(app)[0] == f"flopwright compare --calibration {learnt}"
    assert done.returncode == 0, done.stderr
    report = compared_runs(runs, calibrations(runs)[learnt]).report
    assert json.loads(done.stdout) == report.to_data()
    assert [m.label for m in app.metric][:3] == [
        "median error before",
        "median error after",
        "median error, runs not learnt from",
    ]
    assert list(app.dataframe[0].value["learnt from"]) == ["yes", "yes", "no"]
    box = app.selectbox[0]
    box.select(box.options[-1]).run()  # the public prior
    assert not app.exception
    assert app.metric[0].label == "median error"


def test_compare_explains_a_store_that_cannot_be_opened(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = home / "broken.sqlite"
    broken.write_bytes(b"not a database at all, but long enough to look like one" * 50)
    monkeypatch.setenv("FLOPWRIGHT_STORE", str(broken))
    app = open_page("compare")
    assert not app.exception
    assert "cannot be opened" in app.error[0].value


@pytest.mark.slow
def test_the_app_starts_with_its_first_page() -> None:
    app = testing.AppTest.from_file(str(PAGES.parent / "app.py"), default_timeout=300)
    app.query_params["scenario"] = MINI
    app.run()
    assert not app.exception
    assert app.title[0].value == "Explore"


def test_pages_are_short() -> None:
    for path in PAGES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 150, path.name


def run_cli(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flopwright", *args],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_verb_serves_this_machine_alone() -> None:
    done = run_cli("dashboard", "--port", "18765", "--json")
    assert done.returncode == 0
    command = json.loads(done.stdout)["command"]
    assert "--server.address=127.0.0.1" in command
    assert "--browser.gatherUsageStats=false" in command
    assert command[1:3] == ["-m", "flopwright.dashboards.serve"]


def test_a_taken_port_is_bad_input(unused_port: Callable[[], Any]) -> None:
    with unused_port() as port:
        done = run_cli("dashboard", "--port", str(port))
    assert done.returncode == 2
    assert "cannot be used" in done.stderr


@pytest.fixture
def unused_port() -> Callable[[], Any]:
    import socket
    from contextlib import contextmanager

    @contextmanager
    def listening() -> Any:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            yield server.getsockname()[1]

    return listening


def test_missing_streamlit_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    from flopwright.cli import dashboard

    monkeypatch.setattr(dashboard.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="streamlit and plotly") as error:
        dashboard._check(8501)
    assert "flopwright[dashboard]" in str(error.value)
