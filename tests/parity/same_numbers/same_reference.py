"""The single process: a plain loop with torch's optimizers, which knows nothing of ranks.

    python same_reference.py FOLDER STEPS

writes FOLDER/MODEL-OPTIMIZER-DTYPE.npz with its losses, its weights after QUICK_STEPS and
STEPS (if it comes to them), the experts chosen and, of the first steps, the scores they were
chosen by.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from same_cases import MODELS, TAU, dataset, micro_batches, workload
from same_plans import FREE_STEPS, QUICK_STEPS, ROWS, STEPS
from torch import Tensor, nn

from flopwright.models.optim.qk_clip.module import RecordMaxLogits, clip_
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.plan.learning_rate import learning_rate_at
from flopwright.spec.parameters import parameters
from flopwright.spec.workload import Workload

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def reference_file(folder: Path, model: str, optimizer: str, dtype: str) -> Path:
    """Returns where a reference stands."""
    return folder / f"{model}-{optimizer}-{dtype}.npz"


class Choices:
    """What the routers of a model choose, forward pass by forward pass."""

    def __init__(self, stage: Stage) -> None:
        self._blocks = stage.moe_blocks()
        self.chosen: list[Tensor] = []
        self.scores: list[Tensor] = []
        self._last: dict[int, Tensor] = {}
        for number, block in self._blocks.items():
            block.gate.register_forward_hook(
                lambda gate, inputs, _, n=number: self._score(n, gate, inputs[0])
            )

    @torch.no_grad()
    def _score(self, number: int, gate: Any, tokens: Tensor) -> None:
        scores = torch.sigmoid(tokens @ gate.weight.t())
        self._last[number] = scores + gate.e_score_correction_bias

    def keep(self) -> None:
        """Notes the last forward pass."""
        if self._blocks:
            self.chosen.append(torch.stack([b.last_choices for b in self._blocks.values()]))
            self.scores.append(torch.stack([self._last[n] for n in self._blocks]))


def train(model: str, optimizer: str, dtype: str, folder: Path, steps: int) -> None:
    """Trains and writes one reference."""
    spec, work = MODELS[model], workload(optimizer, dtype)
    data = dataset(work)
    stage = build_stage(spec, range(-1, spec.num_layers + 1), dtype=DTYPES[dtype])
    init_weights_(stage, spec, work.seed)
    stage.train()
    count = len(micro_batches(data, 0))
    for block in stage.moe_blocks().values():
        block.gate.balance_share = 1 / count
    update, choices, losses = Update(stage, work), Choices(stage), []
    clipped, found = 0, {}
    for step in range(steps):
        stage.zero_grad()
        total = 0.0
        with RecordMaxLogits(stage) as recorded:
            for rows in torch.from_numpy(micro_batches(data, step)):
                value = loss(stage(rows[:, :-1].contiguous()), rows[:, 1:].contiguous())
                (value / count).backward()
                total += float(value.detach()) / count
                choices.keep()
        losses.append(total)
        update.step(learning_rate_at(step, work))
        if optimizer == "muonclip":
            clip_(stage, recorded.maxima, TAU)
            clipped += sum(int((m > TAU).sum()) for m in recorded.maxima.values())
        for block in stage.moe_blocks().values():
            assert block.loads is not None
            if block.gate.counts is None:
                block.gate.update_bias_(block.loads)
            else:
                block.gate.update_quantiles_(block.gate.counts)
            block.reset_loads()
        if step + 1 in {QUICK_STEPS, STEPS}:
            for name, tensor in stage.state_dict().items():
                found[f"{step + 1}/{name}"] = tensor.detach().numpy().copy()
    assert losses[-1] < losses[0] - 0.02 * steps, "it learns: the steps are real"
    assert optimizer != "muonclip" or clipped > 0
    if choices.chosen:
        chosen = torch.stack(choices.chosen).view(steps, count, *choices.chosen[0].shape)
        scores = torch.stack(choices.scores[: FREE_STEPS * count])
        found["choices"] = chosen.to(torch.int16).numpy()
        found["scores"] = scores.view(FREE_STEPS, count, *scores.shape[1:]).numpy()
    np.savez(reference_file(folder, model, optimizer, dtype), losses=np.array(losses), **found)


class Update:
    """One clipped update by torch's own AdamW, and Muon where it is asked for."""

    def __init__(self, stage: Stage, work: Workload) -> None:
        spec, self._stage, self._clip = work.optimizer, stage, work.optimizer.gradient_clip
        self._named = dict(stage.named_parameters())
        matrices = {p.name for p in parameters(stage.spec) if p.is_matrix and p.trainable}
        muon = sorted(matrices) if spec.kind == "muon" else []
        self._views = {n: [nn.Parameter(m) for m in _single(n, self._named[n].data)] for n in muon}
        rest = [p for n, p in self._named.items() if n not in self._views]
        self._adamw = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim > 1]},
                {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
            ],
            weight_decay=spec.weight_decay,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
        )
        self._muon = torch.optim.Muon(
            [m for views in self._views.values() for m in views] or [nn.Parameter(torch.eye(2))],
            weight_decay=spec.weight_decay,
            momentum=spec.momentum,
            adjust_lr_fn="match_rms_adamw",
        )

    def step(self, learning_rate: float) -> None:
        """Clips the gradients over the whole model and updates the weights."""
        for parameter in self._named.values():
            if parameter.grad is None:  # experts that no token chose
                parameter.grad = torch.zeros_like(parameter)
        assert self._clip is not None
        nn.utils.clip_grad_norm_(self._named.values(), self._clip)
        for group in (*self._adamw.param_groups, *self._muon.param_groups):
            group["lr"] = learning_rate
        self._adamw.step()
        for name, views in self._views.items():
            gradient = self._named[name].grad
            assert gradient is not None
            for view, part in zip(views, _single(name, gradient), strict=True):
                view.grad = part
        with _iterating_in_the_weights_dtype():
            self._muon.step()


def _single(name: str, tensor: Tensor) -> list[Tensor]:
    """Returns the matrices of a stacked tensor; gate and up are two that share storage."""
    stack = tensor.view(-1, *tensor.shape[-2:]).unbind(0)
    return [m for one in stack for m in one.chunk(2 if name.endswith("gate_up_proj") else 1)]


@contextmanager
def _iterating_in_the_weights_dtype() -> Iterator[None]:
    """torch.optim.Muon casts to bf16 whatever it is given; here the cast only copies."""
    cast = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda self: self.clone()
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = cast


def main() -> None:
    """Writes every reference that a row of the table needs."""
    torch.set_num_threads(1)
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    for model, optimizer in sorted({(row.model, row.optimizer) for row in ROWS}):
        for dtype in DTYPES:
            train(model, optimizer, dtype, folder, steps)


if __name__ == "__main__":
    main()
