"""Random small scenarios of every policy, for the two loops and for the accounts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flopwright.spec.rollout import RolloutScenario


def _engine(pick: Any, longest: int, samples: int) -> dict[str, Any]:
    block = int(pick([1, 4, 16]))
    state = int(pick([0, 0, 3]))
    need = (longest + block) // block * block + state
    short = pick([None, need + block, need + block, 2 * need])
    table = {
        "batch": [1, 2, 4, 8, 1000],
        "base": [0.013, 0.0131, 0.0142, 0.017, 0.031],
        "per_context_token": [1.1e-6, 1.2e-6, 1.25e-6, 1.3e-6, 1.31e-6],
        "interpolate": bool(pick([True, False])),
    }
    out: dict[str, Any] = {
        "decode": table,
        "prefill": pick(
            [{}, {"fixed": 0.01, "per_token": 1e-3, "per_pair": 1e-6}, {"per_token": 0.002}]
        ),
        "kv_capacity_tokens": None if short is None else int(short),
        "block_tokens": block,
        "kv_tokens_per_attempt": state,
        "kv_bytes_per_token": 1000.0,
        "max_running": pick([None, None, 3]),
        "chunk_tokens": pick([None, 7, 64]),
        "prefix_cache": bool(samples > 1 and pick([True, False])),
        "speculation": pick([None, {"drafts": 3, "acceptance": 0.6, "draft": 0.002}]),
    }
    if pick([True, False]):
        out["host_pool"] = {"size": f"{int(pick([0, 40, 4000]))} kB", "bandwidth": "50 kB/s"}
        out["preemption"] = pick(["swap", "recompute"])
    return out


def random_scenario(seed: int) -> RolloutScenario:
    """Returns a small scenario; every policy and every limit appears over a few dozen seeds."""
    rng = np.random.default_rng([seed, 77])

    def pick(choices: list[Any]) -> Any:
        return choices[int(rng.integers(len(choices)))]

    samples, agent = int(pick([1, 2, 4])), pick([None, "turns", "steps"])
    cap = int(pick([12, 40, 120]))
    data: dict[str, Any] = {
        "name": f"random_{seed}",
        "prompts": int(rng.integers(3, 9)),
        "samples_per_prompt": samples,
        "prompt_tokens": int(pick([0, 5, 21])),
        "instances": int(rng.integers(1, 4)),
        "group_correlation": pick([0, 0.6]),
        "ties": pick(["all", "strict"]),
        "drift": pick([{}, {"per_round": 1.1}]),
        "lengths": pick(
            [
                {"kind": "lognormal", "mean": 20, "sigma": 1.0, "cap": cap},
                {"kind": "exponential", "mean": 15, "cap": cap},
                {"kind": "empirical", "values": [1, 2, 3, 11], "cap": cap},
            ]
        ),
        "slots_per_instance": pick([None, None, None, 5]),
        "schedule": {
            "order": pick(["fifo", "longest_first", "oracle", "probe"]),
            "routing": pick(["pooled", "pooled", "uniform", "group"]),
            "concurrency": pick([None, None, None, 3]),
        },
        "stop": pick([{}, {}, {"count": "groups"}, {"rule": "over_issue", "factor": 1.5},
                      {"rule": "token_budget", "tokens": 9}, {"keep": False}]),
        "kv": {
            "on_update": pick(["drop", "keep", "park"]),
            "idle": pick(["keep", "drop"]),
            "prefetch": bool(pick([True, False])),
        },
    }  # fmt: skip
    if data["stop"].get("rule") is None:
        data["lambda"] = pick([0.3, 0.6, 0.9, 1.0])
    rule = pick(["none", "none", "wait", "drop", "mask"])
    if rule != "none" and not (rule == "wait" and data["stop"].get("tokens")):
        data["staleness"] = {"rule": rule, "max_versions": int(pick([0, 1, 2]))}
    if data["schedule"]["routing"] == "pooled":
        data["schedule"]["chunk_tokens"] = pick([None, 6])
    if pick([True, False, False]):
        data["throttle"] = {"high": 0.9, "low": 0.7, "start": pick([None, 2])}
    if agent is not None:
        data["agent"] = {
            **({"turns": {"kind": "deterministic", "tokens": 3}} if agent == "turns" else {}),
            **({"tokens_per_turn": 5} if agent == "steps" else {}),
            "tool_tokens": {"kind": "exponential", "mean": 6, "cap": 20},
            "tool_time": {"kind": pick(["fixed", "exponential"]), "mean": "300 ms"},
            "max_context": 200,
            "sandbox": {
                "create": "100 ms", "resume": "20 ms", "pause": bool(pick([True, False])),
                "fork": pick([None, "10 ms"]), "image_hit": 0.5, "image_pull": "1 s",
                "hosts": pick([None, 1]), "host_cpus": 3, "cpus": 1,
            },
        }  # fmt: skip
    longest = 200 if agent is not None else 21 + cap
    if pick([True, True, False]):
        data["engine"] = _engine(pick, max(longest, data["prompt_tokens"] + 2), samples)
    else:
        data["decode"] = {
            "per_step": "13 ms",
            "per_attempt": "1.7 ms",
            "per_context_token": "9 us",
        }
        data["prefill"] = pick([None, {"fixed": 0.003, "per_token": 1e-3}])
        data["kv"]["per_token"] = "1000 B"
        if pick([True, False]):
            data["kv"]["capacity"] = f"{1000 * int(pick([1, 2])) * (longest + 1)} B"
        if pick([True, False]):
            data["kv"]["host"] = {"size": "60 kB", "bandwidth": "100 kB/s"}
            data["kv"]["nvme"] = pick([None, {"size": "1 MB", "bandwidth": "20 kB/s"}])
            data["kv"]["preemption"] = pick([None, "swap"])
    host = data["kv"].get("host") or data.get("engine", {}).get("host_pool")
    if host is None and data["kv"]["on_update"] == "park":
        data["kv"]["on_update"] = "keep"
    data["reward"] = pick([{}, {"kind": "program", "time": {"mean": "2 s"}, "workers": 2},
                           {"kind": "tournament", "verdict_tokens": 50}])  # fmt: skip
    if data["reward"] and data["stop"].get("tokens") is None and pick([True, False]):
        data["stop"] = {**data["stop"], "rewarded": True}
        if data["reward"]["kind"] == "tournament":
            data["stop"]["count"] = "groups"
    return RolloutScenario.model_validate(data)


@pytest.fixture
def scenario_of_seed():
    """The function that makes a random scenario from a seed."""
    return random_scenario
