"""Forward and backward of a shrunk Kimi K2: ours against transformers' DeepseekV3.

Same weights, same tokens, one thread, one process, interleaved rounds; both sides include
the cross-entropy. One JSON object as the last line: `ratio_vs_transformers` is their median
time over ours by dtype, 1 or more where ours is at least as fast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.executor.measure.fingerprint import processor_name
from flopwright.models.hf.config_out import hf_config
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.spec.load import load_model
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import num_params

BATCH, SEQ = 4, 512
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shrunk_k2() -> ModelSpec:
    """Returns Kimi K2 with hidden 256, 4 layers and 16 experts of which a token takes 4."""
    return load_model("kimi_k2").shrunk(
        hidden_size=256, num_layers=4, num_experts=16, top_k=4, max_seq_len=SEQ
    )


def their_model(spec: ModelSpec, weights: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Returns transformers' model with the weights; its default attention and experts."""
    import transformers

    config = transformers.DeepseekV3Config(
        **{k: v for k, v in hf_config(spec).items() if k not in {"architectures", "model_type"}}
    )
    model = transformers.DeepseekV3ForCausalLM(config).to(dtype)
    found = model.load_state_dict(weights, strict=True)
    assert not found.missing_keys
    return model.train()


def steps(
    spec: ModelSpec, dtype: torch.dtype
) -> tuple[Callable[[], float], Callable[[], float], float]:
    """Returns one step of ours and of theirs, and how far their losses are apart."""
    ours = build_stage(spec, range(-1, spec.num_layers + 1), dtype=dtype)
    init_weights_(ours, spec, 0)
    theirs = their_model(spec, ours.state_dict(), dtype)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(spec.vocab_size, (BATCH, SEQ), generator=generator)
    targets = tokens.roll(-1, 1)

    def our_step() -> float:
        value = loss(ours(tokens), targets)
        value.backward()
        return _finish(ours, value)

    def their_step() -> float:
        logits = theirs(tokens, use_cache=False).logits
        value = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        value.backward()
        return _finish(theirs, value)

    return our_step, their_step, abs(our_step() - their_step())


def _finish(model: Stage | torch.nn.Module, value: Tensor) -> float:
    for p in model.parameters():
        p.grad = None
    return value.item()


def _timed(step: Callable[[], float]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(spec: ModelSpec, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Returns medians in seconds, their ratio, and the spread of the rounds' ratios."""
    ours, theirs, gap = steps(spec, dtype)
    for step in (ours, theirs):
        step()
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for i in range(repeats):
        order = (("ours", ours), ("theirs", theirs))
        for name, step in order if i % 2 == 0 else reversed(order):
            times[name].append(_timed(step))
    ratios = [b / a for a, b in zip(times["ours"], times["theirs"], strict=True)]
    a, b = statistics.median(times["ours"]), statistics.median(times["theirs"])
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "ours_s": a, "theirs_s": b, "ratio": b / a, "spread": (high - low) / (b / a),
        "loss_gap": gap,
    }  # fmt: skip


def main() -> None:
    """Measures both precisions and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec = shrunk_k2()
    found = {name: measure(spec, DTYPES[name], options.repeats) for name in options.dtypes}
    print(
        json.dumps(
            {
                "ratio_vs_transformers": {k: v["ratio"] for k, v in found.items()},
                "ours_s": {k: v["ours_s"] for k, v in found.items()},
                "theirs_s": {k: v["theirs_s"] for k, v in found.items()},
                "loss_gap": {k: v["loss_gap"] for k, v in found.items()},
                "num_params": num_params(spec),
                "tokens": BATCH * SEQ,
                "threads": torch.get_num_threads(),
                "machine": processor_name(),
                "date": datetime.now(UTC).date().isoformat(),
                "repeats": options.repeats,
                "spread": {k: v["spread"] for k, v in found.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
