"""What a stage needs of the ranks around it, made from the plan and this rank's groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flopwright.executor.parallel.context import GroupContextParallel
from flopwright.executor.parallel.expert_cuts import SharedRows
from flopwright.executor.parallel.experts import AllToAllDispatch, Clock
from flopwright.executor.parallel.groups import Groups
from flopwright.executor.parallel.tensor import GroupTensorParallel
from flopwright.models.moe.dispatch import Dispatcher, LocalDispatch
from flopwright.models.parallel import (
    ContextParallel,
    TensorParallel,
    WholeMatrices,
    WholeSequences,
)
from flopwright.models.transformer.module import Stage, build_stage
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.sharding import Axis
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import EMBEDDING_LAYER


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How this rank shares matrices, sequences and experts with others.

    Attributes:
        places: (ranks, this rank's index) of the groups that cut tensors.
        dispatcher: None where all experts live here whole.
    """

    plan: ParallelPlan
    tensor: TensorParallel
    context: ContextParallel
    dispatcher: Dispatcher | None
    places: dict[Axis, tuple[int, int]]

    def build_chunk(
        self, spec: ModelSpec, chunk: int, dtype: torch.dtype, device: torch.device
    ) -> Stage:
        """Returns this rank's part of a pipeline chunk, its weights unset."""
        layers = list(self.plan.chunk_layers(spec.num_layers)[chunk])
        if chunk == 0:
            layers.insert(0, EMBEDDING_LAYER)
        if chunk == self.plan.num_chunks - 1:
            layers += range(spec.num_layers, spec.num_layers + 1 + spec.mtp_layers)
        return build_stage(
            spec,
            layers,
            dispatcher=self.dispatcher,
            ep_size=self.places["ep"][0],
            ep_rank=self.places["ep"][1],
            etp_size=self.places["etp"][0],
            etp_rank=self.places["etp"][1],
            tensor=self.tensor,
            context=self.context,
            dtype=dtype,
            device=device,
        )

    def own_tokens(self, tokens: Tensor) -> Tensor:
        """Returns the tokens [B, S / cp] of whole sequences [B, S] that this rank reads."""
        if isinstance(self.context, GroupContextParallel):
            return self.context.own_tokens(tokens)
        return tokens

    def hidden_shape(self, seq_len: int, hidden: int) -> tuple[int, int, int]:
        """Returns the shape of the hidden states between this rank's layers."""
        cut = self.plan.tp if self.tensor.sequence_parallel else 1
        return (self.plan.micro_batch_size, seq_len // self.plan.cp // cut, hidden)


def make_sharing(plan: ParallelPlan, groups: Groups, clock: Clock) -> Sharing:
    """Returns what a rank shares under `plan`; its messages are timed by `clock`."""
    tensor: TensorParallel = WholeMatrices()
    if plan.tp > 1:
        tensor = GroupTensorParallel(groups.tp, clock, plan.sequence_parallel)
    context: ContextParallel = WholeSequences()
    if plan.cp > 1:
        context = GroupContextParallel(groups.cp, clock, plan.context_parallel)
    dispatcher: Dispatcher | None = None
    if plan.ep > 1:
        dispatcher = AllToAllDispatch(groups.ep, clock)
    if plan.etp > 1:
        dispatcher = SharedRows(dispatcher or LocalDispatch(), groups.etp, clock)
    members = {"tp": groups.tp, "ep": groups.ep, "etp": groups.etp}
    return Sharing(
        plan=plan,
        tensor=tensor,
        context=context,
        dispatcher=dispatcher,
        places={axis: (g.size, g.index) for axis, g in members.items()},  # type: ignore[misc]
    )


def tp_whole_names(stages: Iterable[Stage]) -> frozenset[str]:
    """Returns the tensors that stand whole on every tensor-parallel rank."""
    return frozenset(name for stage in stages for name in stage.tp_whole_names())


def tp_partial_names(stages: Iterable[Stage]) -> frozenset[str]:
    """Returns those of them of which each rank's gradient is a part of a sum."""
    return frozenset(name for stage in stages for name in stage.tp_partial_names())
