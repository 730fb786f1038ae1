"""MuonClip training of a K2-shaped model, against torch's optimizers in one process.

Used by muon_rank_checks.py; float64 but where DeepSpeed cuts something.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from flopwright.executor.data.token_batch import TokenBatch
from flopwright.executor.launch.request import RunEntry
from flopwright.executor.parallel.groups import GroupRegistry, Groups
from flopwright.executor.train.trial import DTYPES, start_trial
from flopwright.models.optim.qk_clip.module import RecordMaxLogits, clip_
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.plan.learning_rate import learning_rate_at
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.sharding import cuts
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_model, load_scenario, make_plan_file
from flopwright.spec.parameters import ParamTensor, parameters
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import LearningRate, Optimizer, Precision

STEPS: Final = 3
TAU: Final = 0.3  # below what the first weights give, so that heads are clipped
CPU: Final = torch.device("cpu")


def scenario(width: Literal["fp32", "fp64"]) -> Scenario:
    """Returns K2's blocks in two thin layers."""
    base, model = load_scenario("kimi_k2_mini_2cpu_fp32"), load_model("kimi_k2_mini")
    assert model.moe is not None
    moe = model.moe.model_copy(update={"num_experts": 8, "bias_update_rate": 0.05})
    thin = {"num_layers": 2, "vocab_size": 96, "hidden_size": 64, "moe": moe}
    wide = Precision(
        compute=width,
        weights=width,
        gradients=width,
        optimizer_state=width,
        master_weights="none",
    )
    optimizer = Optimizer(kind="muon", qk_clip_tau=TAU, gradient_clip=0.5)
    rate = LearningRate(kind="constant", peak=0.01, final=0.0, warmup_steps=2)
    workload = base.workload.model_copy(
        update={
            "seq_len": 24,
            "global_batch_size": 8,
            "total_tokens": 24 * 8 * 20,
            "precision": wide,
            "optimizer": optimizer,
            "learning_rate": rate,
        }
    )
    update = {"model": model.model_copy(update=thin), "workload": workload}
    cluster = base.cluster.model_copy(update={"num_nodes": 2})
    return base.model_copy(update=update | {"cluster": cluster})


class Rows:
    """The data set's interface over made-up tokens."""

    def __init__(self, spec: Scenario) -> None:
        workload = spec.workload
        shape = (STEPS, workload.global_batch_size, workload.seq_len + 1)
        self.rows = np.random.default_rng(0).integers(0, spec.model.vocab_size, shape)

    def rank_batch(self, step: int, rank: int, dp: int, size: int) -> TokenBatch:
        """Returns tokens [micro-batches, size, seq_len + 1] of one rank."""
        rows = self.rows[step].reshape(-1, dp, size, self.rows.shape[-1])[:, rank]
        return TokenBatch(tokens=rows)


def check_muonclip(
    name: str, fields: dict[str, Any], registry: GroupRegistry, clone: Any
) -> dict[str, Any]:
    """Returns the largest relative difference of a weight, and what QK-Clip saw."""
    spec = scenario("fp32" if "fp32" in name else "fp64")
    plan = ParallelPlan(micro_batch_size=2, **fields)
    entry = RunEntry(name="p", plan=make_plan_file(spec, plan, "p"))
    data: Any = Rows(spec)
    trial = start_trial(entry, spec.workload, data, registry, CPU)
    clipped: list[int] = []
    for step in range(STEPS):
        record = trial.run_step(step)
        assert record.logits is not None
        clipped.append(int(record.logits[1]))
    expected = _reference(spec, data.rows, clone)
    tensors = {p.name: p for p in parameters(spec.model)}
    wrong = {}
    for tensor, mine in trial.tensors():  # routers' biases too
        whole = _own_part(tensors[tensor], expected[tensor], plan, trial.groups)
        wrong[tensor] = float((mine - whole).norm() / whole.norm().clamp(min=1e-30))
    worst = max(wrong, key=wrong.__getitem__)
    stage = {"optimizer_state": 0}  # of the device
    if not plan.optimizer_offload:
        stage = predict(spec, plan)[0].metrics.memory_bytes[trial.groups.coordinates["pp"]]
    return {
        "difference": wrong[worst],
        "worst": worst,
        "clipped": clipped,
        "optimizer_bytes": trial.data_parallel.optimizer_bytes(),
        "predicted_bytes": stage["optimizer_state"],
    }


def _own_part(param: ParamTensor, whole: Tensor, plan: ParallelPlan, groups: Groups) -> Tensor:
    """Returns what tp, ep and etp leave of a whole tensor on this rank."""
    for cut in cuts(param, plan):
        group = getattr(groups, cut.axis)
        ranges = cut.ranges(whole.shape[cut.dim], group.size, group.index)
        whole = torch.cat([whole.narrow(cut.dim, a, b - a) for a, b in ranges], cut.dim)
    return whole


def _reference(spec: Scenario, rows: Any, clone: Any) -> dict[str, Tensor]:
    """Returns the weights that one process has after STEPS steps on the whole batch."""
    model, workload = spec.model, spec.workload
    dtype = DTYPES[workload.precision.weights]
    stage = build_stage(model, range(-1, model.num_layers + 1), dtype=dtype)
    init_weights_(stage, model, workload.seed)
    stage.train()
    muon, adamw, views = _optimizers(stage, spec)
    for step in range(STEPS):
        batches = torch.from_numpy(rows[step]).view(-1, 2, rows.shape[-1])
        stage.zero_grad()
        with RecordMaxLogits(stage) as recorded:
            for batch in batches:
                value = loss(stage(batch[:, :-1].contiguous()), batch[:, 1:].contiguous())
                (value / len(batches)).backward()
        nn.utils.clip_grad_norm_(stage.parameters(), workload.optimizer.gradient_clip or 1e9)
        for matrix, gradient in views():
            matrix.grad = gradient
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = learning_rate_at(step, workload)
        with clone():
            muon.step()
        adamw.step()
        clip_(stage, recorded.maxima, TAU)
        for block in stage.moe_blocks().values():
            assert block.loads is not None
            block.gate.update_bias_(block.loads)
            block.reset_loads()
    return dict(stage.state_dict())


def _optimizers(stage: Stage, spec: Scenario) -> Any:
    """Returns torch's optimizers over views of single matrices and over the rest."""
    optimizer = spec.workload.optimizer
    matrices = {p.name for p in parameters(spec.model) if p.is_matrix and p.trainable}
    named = dict(stage.named_parameters())

    def split(name: str, tensor: Tensor) -> list[Tensor]:
        parts = 2 if name.endswith("gate_up_proj") else 1
        stack = tensor.view(-1, *tensor.shape[-2:]).unbind(0)
        return [m for one in stack for m in one.chunk(parts)]

    views = {n: [nn.Parameter(m) for m in split(n, named[n].data)] for n in sorted(matrices)}
    muon = torch.optim.Muon(
        [m for ms in views.values() for m in ms],
        weight_decay=optimizer.weight_decay,
        momentum=optimizer.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = [p for n, p in named.items() if n not in matrices]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim > 1]},
            {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
        ],
        weight_decay=optimizer.weight_decay,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
    )

    def gradients() -> list[tuple[nn.Parameter, Tensor]]:
        found: list[tuple[nn.Parameter, Tensor]] = []
        for name, parts in views.items():
            whole = named[name].grad
            whole = torch.zeros_like(named[name]) if whole is None else whole
            found += zip(parts, split(name, whole), strict=True)
        return found

    return muon, adamw, gradients
