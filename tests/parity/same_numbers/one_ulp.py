"""How far one process parts from itself when one number begins one ulp away.

    python tests/parity/same_numbers/one_ulp.py [MODEL ...]

fp32, with the experts' choices of the first run replayed: what is left is how rounding grows.
Prints for each model the largest relative difference of the loss over the steps, and those of
the weights and of the routers' biases at the end (largest relative norm over tensors).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from same_cases import MODELS, dataset, micro_batches, workload
from same_plans import STEPS
from same_reference import Update
from torch import Tensor

from flopwright.models.transformer.module import build_stage, init_weights_, loss
from flopwright.plan.learning_rate import learning_rate_at
from flopwright.spec.model import ModelSpec


@dataclass
class Run:
    """What a training left: by step the loss, by forward pass the choices, the last tensors."""

    losses: list[float] = field(default_factory=list)
    choices: list[dict[int, Tensor]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def train(spec: ModelSpec, steps: int, first: Run | None) -> Run:
    """Trains from the same first weights; with `first` nudged, and with its choices."""
    work, out = workload("adamw", "fp32"), Run()
    data = dataset(work)
    stage = build_stage(spec, range(-1, spec.num_layers + 1))
    init_weights_(stage, spec, work.seed)
    stage.train()
    blocks, count = stage.moe_blocks(), len(micro_batches(data, 0))
    for block in blocks.values():
        block.gate.balance_share = 1 / count
    if first is not None:
        with torch.no_grad():
            number = next(stage.parameters()).view(-1)[:1]
            number.copy_(torch.nextafter(number, torch.tensor(math.inf)))
    update = Update(stage, work)
    for step in range(steps):
        stage.zero_grad()
        out.losses.append(0.0)
        for place, rows in enumerate(torch.from_numpy(micro_batches(data, step))):
            for number, block in blocks.items():
                replayed = None if first is None else first.choices[step * count + place][number]
                block.routing_replay = replayed
            value = loss(stage(rows[:, :-1].contiguous()), rows[:, 1:].contiguous())
            (value / count).backward()
            out.losses[-1] += float(value.detach().double()) / count
            out.choices.append({n: _copy(b.last_choices) for n, b in blocks.items()})
        update.step(learning_rate_at(step, work))
        for block in blocks.values():
            balance(block)
    out.tensors = {n: t.detach().double().clone() for n, t in stage.state_dict().items()}
    return out


def balance(block: Any) -> None:
    """Moves a router's biases at a step's end."""
    if block.gate.counts is None:
        block.gate.update_bias_(block.loads)
    else:
        block.gate.update_quantiles_(block.gate.counts)
    block.reset_loads()


def _copy(choices: Tensor | None) -> Tensor:
    assert choices is not None
    return choices.clone()


def variants() -> dict[str, ModelSpec]:
    """Returns the models compared."""
    k3 = MODELS["k3"]
    full = k3.model_copy(update={"linear_attention": None, "full_attention_layers": None})
    return {
        "k2": MODELS["k2"],
        "k3": k3,
        "k3, full attention in all layers": full,
        "k3, norms with eps 1e-6": k3.model_copy(update={"norm_eps": 1e-6}),
        "k3, norms with eps 1e-4": k3.model_copy(update={"norm_eps": 1e-4}),
        "kl": MODELS["kl"],
    }


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    sys.stdout.write("| model | loss | weights | biases |\n|---|---|---|---|\n")
    every = variants()
    for name in sys.argv[1:] or every:
        first = train(every[name], STEPS, None)
        second = train(every[name], STEPS, first)
        pairs = zip(first.losses, second.losses, strict=True)
        apart = max(abs(a - b) / a for a, b in pairs)
        worst = {"weights": 0.0, "biases": 0.0}
        for tensor, value in first.tensors.items():
            kind = "biases" if tensor.endswith("e_score_correction_bias") else "weights"
            norm = float(value.norm())
            error = float((second.tensors[tensor] - value).norm())
            worst[kind] = max(worst[kind], error / norm if norm else error)
        row = f"| {name} | {apart:.1e} | {worst['weights']:.1e} | {worst['biases']:.1e} |\n"
        sys.stdout.write(row)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
