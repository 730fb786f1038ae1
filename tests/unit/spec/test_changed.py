"""Fields changed by name: as the file would say it, all violations at once."""

from __future__ import annotations

import json

import pytest

from flopwright.cli import main
from flopwright.errors import InputError
from flopwright.spec.changed import changed, parse_changes
from flopwright.spec.load import load_cluster, load_model, load_scenario

MINI = "kimi_k2_mini_2cpu_fp32"


def test_values_stand_where_the_file_has_them() -> None:
    scenario = load_scenario(MINI)
    words = ["cluster=64_h100", "cluster.num_nodes=2", "model=llama31_8b", "workload.seq_len=32"]
    made = changed(scenario, parse_changes(words))
    assert made.model == load_model("llama31_8b")
    assert made.cluster.node == load_cluster("64_h100").node
    assert made.cluster.num_nodes == 2  # the outer field first, in whatever order they come
    assert made.workload.seq_len == 32
    assert changed(scenario, parse_changes(reversed(words))) == made
    assert changed(scenario, {}) == scenario
    assert scenario == load_scenario(MINI)


def test_every_wrong_value_is_said() -> None:
    with pytest.raises(InputError) as error:
        changed(
            load_scenario(MINI),
            {"model": "llama31_8bb", "workload.seq_len": -1, "workload.seq_length": 5},
        )
    fields = {v.field for v in error.value.violations}
    assert {"model", "workload.seq_len", "workload.seq_length"} <= fields
    near = next(v for v in error.value.violations if v.field == "model")
    assert "llama31_8b" in near.nearest_fix


@pytest.mark.parametrize("word", ["seq", "=5", "a.b=[1", "a=1: 2", "a=!!python/name:os.system x"])
def test_words_that_say_nothing(word: str) -> None:
    with pytest.raises(InputError) as error:
        parse_changes([word])
    assert error.value.violations[0].field == "--set"


def test_a_field_is_set_once() -> None:
    with pytest.raises(InputError, match="twice"):
        parse_changes(["workload.seq_len=1", "workload.seq_len=2"])


def test_an_upload_names_the_catalogs_only() -> None:
    with pytest.raises(InputError, match="cannot refer to files"):
        changed(load_scenario(MINI), {"model": "/etc/passwd.yaml"}, files=False)


def test_plan_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", MINI, "--set", "workload.global_batch_size=64", "--zero", "1", "--json"])
    assert ended.value.code in {0, None}
    data = json.loads(capsys.readouterr().out)
    batch = data["best"]["plan"] if "plan" in data.get("best", {}) else data
    assert batch
    with pytest.raises(SystemExit) as ended:
        main(["plan", MINI, "--set", "workload.global_batch_size=0", "--json"])
    assert ended.value.code == 2
