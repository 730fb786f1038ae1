"""`flopwright explain` as users call it."""

import json

import pytest

from flopwright.cli import main
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file

MINI = "kimi_k2_mini_2cpu_fp32"


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["explain", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.slow
def test_explains_the_best_plan(capsys) -> None:
    code, out, _ = _run(capsys, MINI)
    assert code == 0
    for text in ("fits: kimi_k2_mini", "What binds it", "one choice away", "What more would buy"):
        assert text in out


def test_a_question_of_a_given_plan_as_json(capsys, tmp_path) -> None:
    plan = ParallelPlan(dp_shard=2, micro_batch_size=2)
    path = tmp_path / "plan.yaml"
    path.write_text(dump_yaml(make_plan_file(load_scenario(MINI), plan, "own")))
    arguments = (MINI, "--plan", str(path), "--question", "expected_peak", "--json")
    code, out, _ = _run(capsys, *arguments)
    assert code == 0
    data = json.loads(out)
    assert data["explanation"] is None
    assert [a["question"] for a in data["answers"]] == ["expected_peak"]
    assert data["plan"]["micro_batch_size"] == 2


def test_an_unknown_question_is_refused_with_the_nearest(capsys) -> None:
    code, _, err = _run(capsys, MINI, "--question", "wen_hybrid")
    assert code == 2
    assert "did you mean 'when_hybrid'?" in err


def test_a_plan_of_another_model_is_refused(capsys, tmp_path) -> None:
    other = load_scenario("first_steps")
    path = tmp_path / "plan.yaml"
    path.write_text(dump_yaml(make_plan_file(other, ParallelPlan(), "other")))
    code, _, err = _run(capsys, MINI, "--plan", str(path))
    assert code == 2
    assert "the plan is for" in err
