"""Files become records, or every violation at once with line, field, rule and fix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec import load
from flopwright.spec.load import (
    catalog_names,
    dump_yaml,
    load_cluster,
    load_gpu,
    load_model,
    load_plan,
    load_scenario,
    make_plan_file,
    scenario_from_text,
)
from flopwright.spec.yaml_lines import parse_yaml, read_yaml

K2 = "kimi_k2_pretrain_2048gpu_h800_bf16"


@pytest.mark.parametrize("name", catalog_names(load.MODEL_CATALOG))
def test_every_catalog_model_loads_and_is_named_like_its_file(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.source


@pytest.mark.parametrize("name", catalog_names(load.GPU_CATALOG))
def test_every_catalog_gpu_has_a_source_for_every_number(name: str) -> None:
    gpu = load_gpu(name)
    assert gpu.name == name
    numbers = set(gpu.to_data()) - {"name", "kind", "sources"}
    assert numbers <= set(gpu.sources), f"without a source: {numbers - set(gpu.sources)}"


@pytest.mark.parametrize("name", catalog_names(load.CLUSTER_CATALOG))
def test_every_catalog_cluster_loads(name: str) -> None:
    assert load_cluster(name).name == name


@pytest.mark.parametrize("name", catalog_names(load.SCENARIO_CATALOG))
def test_every_scenario_loads_and_reads_back_from_its_own_text(name: str) -> None:
    scenario = load_scenario(name)
    again = scenario_from_text(dump_yaml(scenario))
    assert again == scenario
    assert again.content_hash() == scenario.content_hash()


def broken_scenario() -> str:
    text = dump_yaml(load_scenario(K2))
    for old, new in (
        ("num_heads: 64", "num_headz: 64"),
        ("hbm: 80 GiB", "hbm: 80 GB"),
        ("  seq_len: 4096\n  global", "  seq_len: -3\n  global"),
        ("kind: muon", "kind: muoon"),
    ):
        assert old in text
        text = text.replace(old, new)
    return text


def test_all_violations_come_at_once_with_line_field_and_fix() -> None:
    text = broken_scenario()
    with pytest.raises(InputError) as caught:
        scenario_from_text(text, "my.yaml")
    by_field = {v.field: v for v in caught.value.violations}
    assert set(by_field) == {
        "model.attention.num_heads",
        "model.attention.num_headz",
        "cluster.node.gpu.hbm",
        "workload.seq_len",
        "workload.optimizer.kind",
    }
    assert by_field["model.attention.num_headz"].nearest_fix == "did you mean 'num_heads'?"
    assert "74.5 GiB" in by_field["cluster.node.gpu.hbm"].rule
    assert by_field["workload.optimizer.kind"].nearest_fix == "did you mean 'muon'?"
    lines = text.splitlines()
    for field, violation in by_field.items():
        assert violation.file == "my.yaml"
        if violation.rule != "a required key is missing":
            assert lines[violation.line - 1].strip().startswith(field.rsplit(".", 1)[-1] + ":")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("name: [a", "not valid YAML"),
        ("a: &x 1\nb: *x\n", "aliases are not allowed"),
        ("name: a\nname: b\n", "the key stands twice"),
        ("a: !!python/object/apply:os.system ['true']\n", "tags are not allowed"),
        ("a: 1\nb: !!set {x, y}\n", "scenario.yaml:2: YAML tags are not allowed (!!set)"),
        ("a: !mine 1\n", "YAML tags are not allowed (!mine)"),
        ("a: ! 1\n", "YAML tags are not allowed"),
        ("!!map\na: 1\n", "YAML tags are not allowed"),
        ("a:\n  b: 2:08\n", "scenario.yaml:2: a.b (2:08): YAML reads digits with colons"),
        ("a: 1:30.5\n", "base 60"),
        ("a: 010\n", "base 8"),
        ("- 1\n- 2\n", "expected a mapping"),
        ("", "expected a mapping"),
        ("x: " + "[" * 50 + "]" * 50, "nested too deeply"),
        ("x: " + "[{" * 50_000, "nested too deeply"),
    ],
)
def test_hostile_or_broken_yaml_is_refused(text: str, rule: str) -> None:
    with pytest.raises(InputError) as caught:
        scenario_from_text(text)
    assert rule in str(caught.value)


def test_a_yaml_tag_constructs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "made"
    text = f"a: !!python/object/apply:os.mkdir ['{mark}']\n"
    with pytest.raises(InputError, match="tags are not allowed"):
        parse_yaml(text, "x")
    assert not mark.exists()


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe without a writer would block for ever."""
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(InputError, match="not a regular file"):
            read_yaml(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("global_batch_size: 16384", "global_batch_size: true"),
        ("peak: 0.0002", "peak: yes"),
        ("  tp: []", "  tp: [1, true]"),
    ],
)
def test_true_is_no_number(old: str, new: str) -> None:
    text = dump_yaml(load_scenario(K2))
    assert old in text
    with pytest.raises(InputError) as caught:
        scenario_from_text(text.replace(old, new), "my.yaml")
    (violation,) = caught.value.violations
    assert "true or false" in violation.rule
    assert text.splitlines()[violation.line - 1].strip() == old.strip()


def test_true_is_still_a_switch() -> None:
    text = dump_yaml(load_scenario(K2)).replace("tied_embeddings: false", "tied_embeddings: true")
    assert scenario_from_text(text).model.tied_embeddings


def test_unknown_names_suggest_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'kimi_k2'"):
        load_model("kimi_kx2")
    data = yaml.safe_load(dump_yaml(load_scenario(K2)))
    data["cluster"] = "2048_h80"
    with pytest.raises(InputError, match="did you mean '2048_h800'"):
        scenario_from_text(yaml.safe_dump(data))
    with pytest.raises(InputError, match="No such file"):
        load_scenario(tmp_path / "nothing.yaml")


def test_uploaded_text_cannot_name_files() -> None:
    data = yaml.safe_load(dump_yaml(load_scenario(K2)))
    data["model"] = "../../etc/secret.yaml"
    with pytest.raises(InputError, match="cannot refer to files"):
        scenario_from_text(yaml.safe_dump(data))


def test_plan_file_round_trip_and_tampering(tmp_path: Path) -> None:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    plan = make_plan_file(scenario, ParallelPlan(pp=2, micro_batch_size=4), "pp2")
    path = tmp_path / "plan.yaml"
    path.write_text(dump_yaml(plan, header="made by a test"))
    assert load_plan(path) == plan

    path.write_text(dump_yaml(plan).replace("hidden_size: 192", "hidden_size: 256"))
    with pytest.raises(InputError) as caught:
        load_plan(path)
    assert {v.field for v in caught.value.violations} == {"model_hash", "scenario_hash"}

    path.write_text(dump_yaml(plan).replace("schema_version: 1", "schema_version: 99"))
    with pytest.raises(InputError, match="newer flopwright"):
        load_plan(path)


@pytest.mark.parametrize(("old", "new"), [("pp: 2", "pp: 1"), ("size: 4\n", "size: 8\n")])
def test_a_split_edited_by_hand_is_refused(tmp_path: Path, old: str, new: str) -> None:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    plan = make_plan_file(scenario, ParallelPlan(pp=2, micro_batch_size=4), "pp2")
    before, parallel = dump_yaml(plan).split("\nparallel:\n")
    assert old in parallel
    path = tmp_path / "plan.yaml"
    path.write_text(f"{before}\nparallel:\n{parallel.replace(old, new)}")
    with pytest.raises(InputError, match="make the plan again") as caught:
        load_plan(path)
    assert [v.field for v in caught.value.violations] == ["parallel_hash"]


def test_a_plan_without_the_hash_of_its_split_is_refused(tmp_path: Path) -> None:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    plan = make_plan_file(scenario, ParallelPlan(pp=2, micro_batch_size=4), "pp2")
    path = tmp_path / "plan.yaml"
    path.write_text(dump_yaml(plan).replace(f"parallel_hash: {plan.parallel_hash}\n", ""))
    with pytest.raises(InputError, match="parallel_hash: a required key is missing"):
        load_plan(path)


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("warmup_steps: 500", "warmup_steps: 230969", ("warmup_steps", "total_tokens")),
        ("final: 2.0e-05", "final: 2.0e-03", ("final", "peak")),
        (
            "hold_until_tokens: 10000000000000",
            "hold_until_tokens: 15.6T",
            ("hold_until_tokens", "total_tokens"),
        ),
    ],
)
def test_a_learning_rate_must_fit_its_run(old: str, new: str, names: tuple[str, str]) -> None:
    text = dump_yaml(load_scenario(K2))
    assert old in text
    with pytest.raises(InputError) as caught:
        scenario_from_text(text.replace(old, new))
    assert len(caught.value.violations) == 1
    assert all(name in str(caught.value) for name in names)
