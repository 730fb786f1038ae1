"""Files become records, or every violation at once with line, field, rule and fix."""

from __future__ import annotations

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
from flopwright.spec.yaml_lines import parse_yaml

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
        ("a: !!python/object/apply:os.system ['true']\n", "unknown key"),
        ("- 1\n- 2\n", "expected a mapping"),
        ("", "expected a mapping"),
        ("x: " + "[" * 50 + "]" * 50, "nested too deeply"),
    ],
)
def test_hostile_or_broken_yaml_is_refused(text: str, rule: str) -> None:
    with pytest.raises(InputError) as caught:
        scenario_from_text(text)
    assert rule in str(caught.value)


def test_a_yaml_tag_constructs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "made"
    text = f"a: !!python/object/apply:os.mkdir ['{mark}']\n"
    data = parse_yaml(text, "x").data
    assert not mark.exists()
    assert data == {"a": [str(mark)]}


def test_unknown_names_suggest_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'kimi_k2'"):
        load_model("kimi_k3x2")
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
