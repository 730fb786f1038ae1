"""One rank trains prediction modules and indexers as plain torch would, over micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.executor.parallel.groups import GroupRegistry
from flopwright.executor.parallel.pipeline import MicroBatch
from flopwright.executor.train.trial import Trial, start_trial
from flopwright.models.attention_dsa.module import LightningIndexer
from flopwright.models.transformer.module import build_stage, init_weights_
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import load_model, load_scenario
from flopwright.spec.model import ModelSpec
from flopwright.spec.workload import Workload

ROWS = 4


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _model() -> ModelSpec:
    """DeepSeek-V3.2 in small with a prediction module, its indexers busy."""
    data = load_model("deepseek_v32_mini").to_data()
    data |= {"num_layers": 2, "vocab_size": 97, "mtp_layers": 1}
    data["attention"]["indexer"] |= {"top_k": 6, "loss_weight": 0.5}
    return ModelSpec.model_validate(data)


def _rows() -> Tensor:
    return torch.randint(97, (ROWS, 17), generator=torch.Generator().manual_seed(0))


def _trial(micro_batch_size: int, **plan: Any) -> Trial:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    work = scenario.workload.model_copy(update={"global_batch_size": ROWS, "seq_len": 16})
    model = _model()
    scenario = scenario.model_copy(update={"model": model, "workload": work})
    parallel = ParallelPlan(micro_batch_size=micro_batch_size, data_parallel="none", **plan)
    entry: Any = SimpleNamespace(
        name="a", plan=SimpleNamespace(parallel=parallel, scenario=scenario)
    )
    none: Any = None
    return start_trial(entry, work, none, GroupRegistry(), torch.device("cpu"))


def _gradients(trial: Trial) -> tuple[float, dict[str, Tensor]]:
    """Returns the reported loss and the gradients that the optimizer step finds."""
    found: dict[str, Tensor] = {}

    def keep(_: Any) -> None:
        for stage in trial.chunks.values():
            found.update({n: p.grad.clone() for n, p in stage.named_parameters()})

    handlers = trial.runner._handlers
    for kind in list(handlers):
        if kind.name == "OPTIMIZER_STEP":
            handlers[kind] = keep
    size = trial.plan.micro_batch_size
    batch = [
        MicroBatch(tokens=rows[:, :-1].contiguous(), targets=rows[:, 1:].contiguous())
        for rows in _rows().split(size)
    ]
    loss = trial.runner.run_step(batch)
    assert loss is not None
    return float(loss), found


def _plain(workload: Workload) -> tuple[float, dict[str, Tensor]]:
    spec = _model()
    stage = build_stage(spec, range(-1, spec.num_layers + 2))
    init_weights_(stage, spec, workload.seed)
    stage.loss_apart = True
    value = stage(_rows()[:, :-1].contiguous(), targets=_rows()[:, 1:].contiguous())
    value.backward()
    return float(value.detach()), {n: p.grad for n, p in stage.named_parameters()}


@pytest.mark.parametrize("size", [4, 2, 1])
@pytest.mark.parametrize("fused_loss", [False, True])
def test_micro_batches_add_up_to_the_step(one_rank: None, size: int, fused_loss: bool) -> None:
    trial = _trial(size, fused_loss=fused_loss)
    shares = {m.share for s in trial.chunks.values() for m in s.indexers()}
    assert shares == {size / ROWS}
    loss, found = _gradients(trial)
    expected, exact = _plain(trial.workload)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert found.keys() == exact.keys()
    for name, grad in exact.items():
        error = (found[name] - grad).abs().max() / grad.abs().max()
        assert error < 2e-5, (name, float(error))


def test_prediction_modules_stand_behind_the_head(one_rank: None) -> None:
    trial = _trial(2)
    (stage,) = trial.chunks.values()
    assert stage.layer_numbers == (-1, 0, 1, 2, 3)
    assert len(stage.predictors()) == 1
    assert len(stage.indexers()) == 3
    assert {int(n) for n in trial.moe_blocks()} == {1, 3}
    names = {n for n, _ in trial.tensors()}
    assert "model.layers.3.eh_proj.weight" in names
    assert "model.layers.0.self_attn.indexer.wk.weight" in names
    assert all(isinstance(m, LightningIndexer) for m in stage.indexers())
    assert np.isfinite(_gradients(trial)[0])
