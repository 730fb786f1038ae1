"""`flopwright schema` against the files that ship, judged by the jsonschema package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from flopwright.cli import main
from flopwright.cli._json_schema import attribute_texts
from flopwright.plan.file import PredictedStep
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.cluster import GpuSpec
from flopwright.spec.load import (
    CLUSTER_CATALOG,
    GPU_CATALOG,
    MODEL_CATALOG,
    SCENARIO_CATALOG,
    dump_yaml,
    load_gpu,
    load_scenario,
    make_plan_file,
)
from flopwright.spec.loop import SERVED_CATALOG, is_loop
from flopwright.spec.model import GqaAttention
from flopwright.spec.rollout import ROLLOUT_CATALOG, ParetoLengths

FOLDERS = {
    "scenario": SCENARIO_CATALOG,
    "rollout": ROLLOUT_CATALOG,
    "cluster": CLUSTER_CATALOG,
    "model": MODEL_CATALOG,
    "gpu": GPU_CATALOG,
}
FILES = [
    (kind, path)
    for kind, folder in FOLDERS.items()
    for path in sorted(folder.glob("*.yaml"))
    if kind != "rollout" or not is_loop(path)  # loops stand beside the rounds
]
MINI = "kimi_k2_mini_2cpu_fp32"
K2 = "kimi_k2_pretrain_2048gpu_h800_bf16"


def _schema(capsys: pytest.CaptureFixture[str], kind: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stop:
        main(["schema", kind])
    assert not stop.value.code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def _problems(schema: dict[str, Any], data: object) -> list[str]:
    return [
        f"{e.json_path}: {e.message[:200]}"
        for e in jsonschema.Draft202012Validator(schema).iter_errors(data)
    ]


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_file_that_ships_is_valid(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    schema = _schema(capsys, kind)
    paths = [path for k, path in FILES if k == kind]
    assert paths
    problems = {path.name: _problems(schema, _read(path)) for path in paths}
    assert {name: found for name, found in problems.items() if found} == {}


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        ("loop", [p for p in sorted(ROLLOUT_CATALOG.glob("*.yaml")) if is_loop(p)]),
        ("experiment", sorted((SCENARIO_CATALOG / "published_rl").glob("*.yaml"))[::9]),
        ("served", sorted(SERVED_CATALOG.glob("*.yaml"))),
        ("engine", sorted((GPU_CATALOG.parent / "engines").glob("*.yaml"))),
    ],
)
def test_files_of_rl_are_valid_and_misspelt_ones_are_not(
    capsys: pytest.CaptureFixture[str], kind: str, paths: list[Path]
) -> None:
    schema = _schema(capsys, kind)
    assert len(paths) > 2
    problems = {path.name: _problems(schema, _read(path)) for path in paths}
    assert {name: found for name, found in problems.items() if found} == {}
    assert any("nmae" in p for p in _problems(schema, _read(paths[0]) | {"nmae": "x"}))


@pytest.mark.parametrize("name", [MINI, K2])
def test_a_written_plan_is_valid(capsys: pytest.CaptureFixture[str], name: str) -> None:
    schema = _schema(capsys, "plan")
    predicted = PredictedStep.model_validate(
        {
            "step_time": "1 s",
            "interval80_low": "900 ms",
            "interval80_high": "1.1 s",
            "peak_memory": "1 GiB",
            "provenance": "analytic",
        }
    )
    plan = make_plan_file(load_scenario(name), ParallelPlan(), "one", predicted)
    data = yaml.safe_load(dump_yaml(plan))
    assert _problems(schema, data) == []
    # A plan file is complete in itself, as its reader has it.
    assert _problems(schema, data | {"scenario": data["scenario"] | {"model": "kimi_k2"}})


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_misspelt_key_is_refused(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    schema = _schema(capsys, kind)
    data = _read(next(path for k, path in FILES if k == kind))
    assert any("nmae" in p for p in _problems(schema, data | {"nmae": "x"}))
    for key, value in data.items():
        if isinstance(value, dict) and key != "sources":
            assert _problems(schema, data | {key: value | {"nmae": "x"}}), key


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("scenario", {"model": 7}),
        ("scenario", {"objective": "speed"}),
        ("cluster", {"num_nodes": 0}),
        ("gpu", {"hbm": 80}),
        ("gpu", {"reserved": 0}),
        ("model", {"hidden_size": "wide"}),
        ("rollout", {"lambda": 1.5}),
        ("rollout", {"lengths": {"mean": 5}}),
        ("rollout", {"prompt_tokens": True}),
    ],
)
def test_what_the_reader_refuses_the_schema_refuses(
    capsys: pytest.CaptureFixture[str], kind: str, change: dict[str, Any]
) -> None:
    data = _read(next(path for k, path in FILES if k == kind))
    schema = _schema(capsys, kind)
    assert _problems(schema, data) == []
    assert _problems(schema, data | change)


@pytest.mark.parametrize("value", ["15 s", {"fixed": "15 s"}])
def test_a_rollout_phase_may_be_just_its_time(
    capsys: pytest.CaptureFixture[str], value: object
) -> None:
    data = _read(next(path for k, path in FILES if k == "rollout"))
    changed = data | {"update": value, "weight_sync": value}
    assert _problems(_schema(capsys, "rollout"), changed) == []


def test_a_gpu_may_be_given_by_name_or_path(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cluster = _read(CLUSTER_CATALOG / "local_2cpu.yaml")
    for gpu in ("h800_sxm", "my_gpu.yaml", load_gpu("h800_sxm").to_data()):
        cluster["node"]["gpu"] = gpu
        assert _problems(_schema(capsys, "cluster"), cluster) == []
        scenario = _read(SCENARIO_CATALOG / f"{MINI}.yaml") | {"cluster": cluster}
        assert _problems(_schema(capsys, "scenario"), scenario) == []


def test_fields_carry_what_the_class_says_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = _schema(capsys, "gpu")
    reserved = gpu["properties"]["reserved"]["description"]
    assert reserved.startswith("what the driver, context and communication library keep.")
    assert "80 GiB" in reserved
    assert "Attributes" not in gpu["description"]
    attention = _schema(capsys, "model")["$defs"]["GqaAttention"]["properties"]
    assert attention["bias"]["description"].endswith("have one (Qwen2).")
    texts = attribute_texts(GqaAttention)
    assert texts["sliding_window"].endswith("before it; None: all before it.")
    assert set(attribute_texts(GpuSpec)) <= set(GpuSpec.model_fields)
    assert "cap" in attribute_texts(ParetoLengths)  # from its base


def test_an_unknown_kind_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["schema", "scenaro"])
    assert stop.value.code == 2
    assert "did you mean 'scenario'" in capsys.readouterr().err
