"""`flopwright rollouts` with input that no loop can have: told at once, exit code 2, an end."""

from __future__ import annotations

import json

import pytest

from flopwright.cli import main

ROUND = """
name: r
prompts: 4
samples_per_prompt: 2
prompt_tokens: 50
lengths: {kind: lognormal, mean: 30, sigma: 0.5, cap: 100}
decode: {per_step: 10 ms}
rounds: 1
"""
LOOP = """
kind: rl_loop
name: l
gpus: 2
train: {gpu_s_per_token: 0.001}
search: {layout: [colocated, async], generation_share: [0.5], staleness_bound: [1]}
rollout:
  name: l
  prompts: 4
  samples_per_prompt: 2
  lengths: {kind: lognormal, mean: 30, sigma: 0.5, cap: 100}
  decode: {per_step: 10 ms}
  instances: 2
  rounds: 1
"""


def run(capsys, tmp_path, text: str, *args: str) -> tuple[int, str, str]:
    file = tmp_path / "given.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["rollouts", str(file), *args])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("lambda=0", "lambda"),
        ("lambda=1.2", "lambda"),
        ("lambda=nan", "lambda"),
        ("prompts=0", "prompts"),
        ("prompts=1000000000", "prompts"),
        ("prompts=1000000", "is above 1000000"),
        ("samples_per_prompt=-1", "samples_per_prompt"),
        ("lengths.mean=0", "lengths.mean"),
        ("lengths.sigma=-1", "lengths.sigma"),
        ("lengths.cap=0", "lengths.cap"),
        ("lengths={kind: empirical, values: []}", "lengths.values"),
        ("lengths={kind: empirical, values: [3], weights: [0]}", "not all zero"),
        ("decode={per_step: 0 s}", "above zero"),
        ("decode={per_step: -1 ms}", "decode.per_step"),
        ("decode={per_step: 1 year}", "decode.per_step"),
        ("instances=9", "must not exceed the attempts in flight"),
        ("instances=0", "instances"),
        ("slots_per_instance=0", "slots_per_instance"),
        ("prompt_tokens=-5", "prompt_tokens"),
        ("weight_sync={size: 1 GB}", "bandwidth"),
        ("weight_sync={size: 1 GB, bandwidth: 0 GB/s}", "bandwidth"),
        ("kv={per_token: 1 KiB, capacity: 50 KiB}", "larger than kv.capacity"),
        ("kv={capacity: 50 KiB}", "per_token"),
        ("agent={tokens_per_turn: 10, tool_time: {mean: -1 s}}", "tool_time.mean"),
        ("agent={tokens_per_turn: 0}", "tokens_per_turn"),
        ("agent={tokens_per_turn: 1, max_context: 50}", "above prompt_tokens (50)"),
        ("agent={tokens_per_turn: 5, sandbox: {hosts: 1, cpus: 500}}", "larger than a host"),
        ("reward={kind: judge, workers: 0}", "reward.workers"),
        ("stop={rule: over_issue, factor: 1}", "stop.factor"),
        ("stop={rewarded: true}", "give a reward"),
        ("throttle={high: 0.5, low: 0.9}", "low must not exceed high"),
        ("staleness={rule: drop}", "max_versions"),
        ("rounds=0", "rounds"),
        ("seed=-1", "seed"),
        ("nothing=1", "nothing"),
    ],
)
def test_a_round_that_cannot_be_is_told_by_its_field(capsys, tmp_path, change, words):
    code, out, err = run(capsys, tmp_path, ROUND, "--set", change)
    assert code == 2, out
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("gpus=0", "gpus"),
        ("gpus=100000000", "gpus"),
        ("gpus=0.5", "gpus"),
        ("search.generation_share=[1.5]", "generation_share"),
        ("search.tp=[0]", "search.tp"),
        ("search.lambda=[0]", "search.lambda"),
        ("search.staleness_bound=[-1]", "staleness_bound"),
        ("search.layout=[nowhere]", "search.layout"),
        ("search.elastic=[maybe]", "search.elastic"),
        ("elastic={below: 2}", "elastic.below"),
        ("elastic={start: -1 s}", "elastic.start"),
        ("hosts={reserved: -1 GiB}", "hosts.reserved"),
        ("train={}", "give one of model and gpu_s_per_token"),
        ("train={gpu_s_per_token: -1}", "gpu_s_per_token"),
        ("serve={model: kimi_k2}", "serve needs a cluster"),
        ("rollout.agent={tokens_per_turn: 5, max_context: 0}", "max_context"),
        ("cluster=moon", "no such cluster"),
        ("objective=fame", "objective"),
    ],
)
def test_a_loop_that_cannot_be_is_told_by_its_field(capsys, tmp_path, change, words):
    code, out, err = run(capsys, tmp_path, LOOP, "--set", change)
    assert code == 2, out
    assert words in err
    assert "Traceback" not in err


def test_every_violation_is_told_at_once(capsys, tmp_path):
    changes = ("lambda=2", "prompts=0", "lengths.mean=-1", "decode.per_step=-1 s", "seed=-3")
    args = [word for change in changes for word in ("--set", change)]
    code, out, _ = run(capsys, tmp_path, ROUND, *args, "--json")
    assert code == 2
    fields = {entry["field"] for entry in json.loads(out)["error"]}
    assert fields == {"lambda", "prompts", "lengths.mean", "decode.per_step", "seed"}


@pytest.mark.parametrize(
    "changes",
    [
        ("prompts=1", "samples_per_prompt=64", "lambda=0.05"),  # K > N
        ("lengths={kind: deterministic, tokens: 1}",),
        ("prompts=1", "samples_per_prompt=1", "lambda=0.05"),
        ("prompt_tokens=100000", "lengths.cap=1"),  # a cap below the prompt
        ("agent={tokens_per_turn: 1, max_context: 51}",),  # room for one token
        ("agent={tokens_per_turn: 7, sandbox: {create: 24 h}}",),
        ("update=0 s", "switch={}", "weight_sync=0 s"),
        (
            "stop={rewarded: true, count: groups}",
            "reward={kind: tournament, pairs_per_prompt: 10000}",
        ),
    ],
)
def test_odd_rounds_run_to_their_end(capsys, tmp_path, changes):
    args = [word for change in changes for word in ("--set", change)]
    code, _, err = run(capsys, tmp_path, ROUND, *args, "--json")
    assert code == 0, err


@pytest.mark.parametrize(
    "changes",
    [
        ("rollout.prompts=1", "rollout.samples_per_prompt=64", "search.layout=[async]"),
        ("gpus=1", "rollout.instances=1", "search.layout=[colocated]"),
        ("search.staleness_bound=[0]", "search.elastic=[true]", "search.layout=[async]"),
        ("rollout.update=0 s", "train={gpu_s_per_token: 0}", "search.layout=[async]"),
    ],
)
def test_odd_loops_run_to_their_end(capsys, tmp_path, changes):
    args = [word for change in changes for word in ("--set", change)]
    code, out, err = run(capsys, tmp_path, LOOP, *args, "--json")
    assert code == 0, err
    assert json.loads(out)["ranked"]


def test_a_bound_that_lets_too_much_into_flight_is_no_plan(capsys, tmp_path):
    changes = ("--set", "search.layout=[async]", "--set", "search.staleness_bound=[1000000]")
    code, out, _ = run(capsys, tmp_path, LOOP, *changes)
    assert code == 1
    assert "more attempts into flight" in out
