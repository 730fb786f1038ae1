"""One rank of the checks in test_packed_documents.py: `packing_checks.py WORLD RANK FOLDER`.

A step on rows packed with documents under a plan, against each document by itself in one process:
the loss, the gradient norm, and an update that is a smooth function of each gradient.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.executor.data.token_batch import Document, TokenBatch, joined, pack
from flopwright.executor.launch.request import RunEntry
from flopwright.executor.parallel.groups import GroupRegistry, Groups
from flopwright.executor.train.trial import start_trial
from flopwright.models.transformer.module import build_stage, init_weights_
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.sharding import cuts
from flopwright.spec.load import load_scenario, make_plan_file
from flopwright.spec.packing import Packing
from flopwright.spec.parameters import ParamTensor, parameters
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import LearningRate, Optimizer, Precision

CPU: Final = torch.device("cpu")
SEQ, ROWS, RATE = 24, 8, 0.05
STEPS = (4, ROWS)  # rows of each step
PLANS: Final[dict[str, dict[str, Any]]] = {
    "kimi_k2 ep2 full": {
        "dp_shard": 2, "ep": 2, "micro_batch_size": 2, "recompute": "full",
    },
    "kimi_k2 pp2 selective": {"pp": 2, "micro_batch_size": 2, "recompute": "selective"},
    "kimi_k2 zb": {"pp": 2, "vpp": 2, "schedule": "zb_v", "micro_batch_size": 1},
    "kimi_k2 fsdp": {
        "dp_shard": 2, "zero_stage": 3, "data_parallel": "fsdp2", "micro_batch_size": 2,
    },
    "kimi_k2 tp2": {"tp": 2, "micro_batch_size": 1},
    "llama tp2": {"tp": 2, "sequence_parallel": False, "micro_batch_size": 2},
    "kimi_linear pp2 full": {"pp": 2, "micro_batch_size": 2, "recompute": "full"},
}  # fmt: skip


def scenario(family: str) -> Scenario:
    """Returns a family's blocks in thin layers, in float64."""
    base = load_scenario(f"{family}_mini_2cpu_fp32")
    thin: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "num_layers": 4}
    if base.model.moe is not None:
        moe = base.model.moe.model_copy(update={"num_experts": 8, "bias_update_rate": 0.0})
        thin["moe"] = moe
    wide = Precision(
        compute="fp64", weights="fp64", gradients="fp64", optimizer_state="fp64",
        master_weights="none",
    )  # fmt: skip
    workload = base.workload.model_copy(
        update={
            "seq_len": SEQ,
            "global_batch_size": ROWS,
            "total_tokens": SEQ * ROWS * 4,
            "packing": Packing(),
            "precision": wide,
            "optimizer": Optimizer(eps=1.0, weight_decay=0.0, gradient_clip=None),
            "learning_rate": LearningRate(kind="constant", peak=RATE, final=0.0, warmup_steps=0),
        }
    )
    model = base.model.model_copy(update=thin)
    return base.model_copy(update={"model": model, "workload": workload})


def documents(vocab: int) -> list[list[Document]]:
    """Returns documents of 2 to SEQ + 1 tokens by row, which they fill, weights of their own."""
    rng, found = np.random.default_rng(0), []
    for row in range(ROWS):
        left, here = SEQ + 1, []
        while left:
            length = int(rng.integers(2, 12)) if row else left
            length = left if left - length < 2 else length
            tokens = rng.integers(0, vocab, length).tolist()
            weights = (rng.integers(0, 3, length - 1) / 2).tolist()
            here.append(Document(tokens=tokens, weights=weights))
            left -= length
        found.append(here)
    return found


class Packed:
    """The data set's interface over documents packed once."""

    def __init__(self, whole: TokenBatch) -> None:
        self.whole = whole

    def rank_batch(self, step: int, rank: int, dp: int, size: int) -> TokenBatch:
        """Returns one rank's micro-batches: a ramp of the batch in two steps."""
        numbers = np.arange(STEPS[step])
        assert self.whole.weights is not None
        total = float(self.whole.weights[: STEPS[step]].sum())
        mine = self.whole[numbers.reshape(-1, dp, size)[:, rank]]
        return replace(mine, total_weight=total)


def check(name: str, fields: dict[str, Any], registry: GroupRegistry) -> dict[str, Any]:
    """Returns how far loss, gradient norm and updated weights are off."""
    spec = scenario(name.split()[0])
    rows = [pack(row, SEQ, pad_id=0) for row in documents(spec.model.vocab_size)]
    whole = replace(joined(rows), total_weight=sum(row.total_weight or 0.0 for row in rows))
    assert len(whole) == ROWS
    plan = ParallelPlan(**fields)
    entry = RunEntry(name="p", plan=make_plan_file(spec, plan, "p"))
    data: Any = Packed(whole)
    trial = start_trial(entry, spec.workload, data, registry, CPU)
    for step in range(len(STEPS)):
        record = trial.run_step(step)
        assert record.sequences == STEPS[step]
    wanted_loss, wanted_norm, expected = _alone(spec)
    tensors, worst = {p.name: p for p in parameters(spec.model)}, 0.0
    for tensor, mine in trial.tensors():
        if tensor not in expected:
            continue
        part = _own_part(tensors[tensor], expected[tensor], plan, trial.groups)
        worst = max(worst, float((mine - part).abs().max()))
    loss = torch.zeros((), dtype=torch.float64)
    if record.loss is not None:
        loss = record.loss.double() / (plan.dp * plan.tp)
    dist.all_reduce(loss)
    return {
        "loss": abs(float(loss) - wanted_loss),
        "norm": abs(float(record.gradient_norm) / wanted_norm - 1),
        "weights": worst,
    }


def _alone(spec: Scenario) -> tuple[float, float, dict[str, Tensor]]:
    """Returns the last loss, its gradient norm and the weights, of documents by themselves."""
    model = spec.model
    stage = build_stage(model, range(-1, model.num_layers + 1), dtype=torch.float64)
    init_weights_(stage, model, spec.workload.seed)
    stage.train()
    named = {n: p for n, p in stage.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        named.values(), lr=RATE, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0
    )
    for rows in STEPS:
        found = [d for row in documents(model.vocab_size)[:rows] for d in row]
        weight, total = sum(sum(d.weights or ()) for d in found), 0.0
        optimizer.zero_grad()
        for document in found:
            tokens = torch.tensor([document.tokens])
            logits = stage(tokens[:, :-1])[0]
            nats = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
            value = (nats * torch.tensor(document.weights).double()).sum() / weight
            value.backward()
            total += float(value.detach())
        norm = sum(float(p.grad.square().sum()) for p in named.values() if p.grad is not None)
        optimizer.step()
    return total, norm**0.5, {n: p.detach() for n, p in named.items()}


def _own_part(param: ParamTensor, whole: Tensor, plan: ParallelPlan, groups: Groups) -> Tensor:
    """Returns what tp and ep leave of a whole tensor on this rank."""
    for cut in cuts(param, plan):
        group = getattr(groups, cut.axis)
        ranges = cut.ranges(whole.shape[cut.dim], group.size, group.index)
        whole = torch.cat([whole.narrow(cut.dim, a, b - a) for a, b in ranges], cut.dim)
    return whole


def main() -> None:
    """Runs every check."""
    world, rank, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        world_size=world,
        rank=rank,
        timeout=timedelta(seconds=120),
    )
    registry = GroupRegistry()
    found = {name: check(name, fields, registry) for name, fields in PLANS.items()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
