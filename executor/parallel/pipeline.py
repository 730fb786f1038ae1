"""Runs one rank's lowered list of actions: the executor's half of "one plan, two interpreters".

The list (flopwright.plan.lower) says what to do and in which order; this file knows how.
Nothing is reordered: `Runner.log` equals the list after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.groups import Groups
from flopwright.plan.schedules.actions import Action, ActionKind

LossFn = Callable[[Tensor, Tensor], Tensor]
Key = tuple[int, int]  # chunk, micro-batch

ACTION_CLASSES: Final[dict[ActionKind, str]] = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.SEND_FORWARD: "pp_comm",
    ActionKind.RECV_FORWARD: "pp_comm",
    ActionKind.SEND_BACKWARD: "pp_comm",
    ActionKind.RECV_BACKWARD: "pp_comm",
    ActionKind.REDUCE_GRADIENTS: "dp_comm",
    ActionKind.OPTIMIZER_STEP: "optimizer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Token ids [sequences, seq_len], int64, and the ids that follow them."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """What a rank runs its list with.

    Attributes:
        chunks: the module of each pipeline chunk this rank holds.
        num_chunks: chunks of the whole pipeline; the last one computes the loss.
        loss_fn: (logits, targets) -> mean nats a token.
        hidden_shape: [sequences, seq_len, hidden_size] of what travels between stages.
        reduce_gradients, optimizer_step: the ends of a step (data_parallel/).
    """

    chunks: Mapping[int, nn.Module]
    num_chunks: int
    loss_fn: LossFn
    hidden_shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    reduce_gradients: Callable[[], None]
    optimizer_step: Callable[[], None]


@dataclass(slots=True)
class Runner:
    """Executes a lowered list, step after step, on one rank."""

    actions: Sequence[Action]
    parts: StageParts
    groups: Groups
    timer: ActionTimer
    log: list[Action] = field(default_factory=list)
    _batch: Sequence[MicroBatch] = ()
    _inputs: dict[Key, Tensor] = field(default_factory=dict)
    _outputs: dict[Key, Tensor] = field(default_factory=dict)
    _edges: dict[Key, GradientEdge] = field(default_factory=dict)
    _gradients: dict[Key, Tensor] = field(default_factory=dict)
    _sending: list[tuple[Any, Tensor]] = field(default_factory=list)
    _losses: dict[int, Tensor] = field(default_factory=dict)

    def run_step(self, batch: Sequence[MicroBatch]) -> Tensor | None:
        """Runs one optimizer step; returns the mean loss over micro-batches on the last stage."""
        self.log.clear()
        self._losses.clear()
        self._batch = batch
        handlers = self._handlers()
        for action in self.actions:
            with self.timer.action(str(action), ACTION_CLASSES[action.kind], self._bytes(action)):
                handlers[action.kind](action)
            self.log.append(action)
        self._finish_sends()
        left_over = self._inputs or self._edges or self._gradients
        assert not left_over, "the list did not use every tensor"
        if not self._losses:
            return None
        return torch.stack([self._losses[m] for m in sorted(self._losses)]).mean()

    def _handlers(self) -> dict[ActionKind, Callable[[Action], None]]:
        return {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.RECV_FORWARD: self._receive_forward,
            ActionKind.SEND_FORWARD: self._send_forward,
            ActionKind.RECV_BACKWARD: self._receive_backward,
            ActionKind.SEND_BACKWARD: self._send_backward,
            ActionKind.REDUCE_GRADIENTS: lambda _: self.parts.reduce_gradients(),
            ActionKind.OPTIMIZER_STEP: lambda _: self.parts.optimizer_step(),
        }

    def _is_last(self, chunk: int) -> bool:
        return chunk == self.parts.num_chunks - 1

    def _forward(self, action: Action) -> None:
        key = (action.chunk, action.microbatch)
        batch = self._batch[action.microbatch]
        source = batch.tokens if action.chunk == 0 else self._inputs[key]
        out: Tensor = self.parts.chunks[action.chunk](source)
        if self._is_last(action.chunk):
            out = self.parts.loss_fn(out, batch.targets)
            self._losses[action.microbatch] = out.detach()
        else:
            self._outputs[key] = out.detach()
        # The edge keeps the graph, not the output: what no backward needs is freed once sent.
        self._edges[key] = get_gradient_edge(out)

    def _backward(self, action: Action) -> None:
        key = (action.chunk, action.microbatch)
        if self._is_last(action.chunk):
            loss = self._losses[action.microbatch]
            gradient = torch.full_like(loss, 1.0 / len(self._batch))
        else:
            gradient = self._gradients.pop(key)
        torch.autograd.backward((self._edges.pop(key),), (gradient,))
        source = self._inputs.pop(key, None)
        if source is not None:
            assert source.grad is not None
            self._outputs[key] = source.grad

    def _receive_forward(self, action: Action) -> None:
        buffer = self._receive(action, self.groups.pp_forward.handle)
        self._inputs[action.chunk, action.microbatch] = buffer.requires_grad_()

    def _receive_backward(self, action: Action) -> None:
        buffer = self._receive(action, self.groups.pp_backward.handle)
        self._gradients[action.chunk, action.microbatch] = buffer

    def _send_forward(self, action: Action) -> None:
        self._send(action, self.groups.pp_forward.handle)

    def _send_backward(self, action: Action) -> None:
        self._send(action, self.groups.pp_backward.handle)

    def _receive(self, action: Action, handle: Any) -> Tensor:
        shape, dtype, device = self.parts.hidden_shape, self.parts.dtype, self.parts.device
        buffer = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(buffer, src=self.groups.pp_forward.ranks[action.peer], group=handle)
        return buffer

    def _send(self, action: Action, handle: Any) -> None:
        tensor = self._outputs.pop((action.chunk, action.microbatch)).contiguous()
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        peer = self.groups.pp_forward.ranks[action.peer]
        self._sending.append((dist.isend(tensor, dst=peer, group=handle), tensor))

    def _finish_sends(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _bytes(self, action: Action) -> int:
        if ACTION_CLASSES[action.kind] != "pp_comm":
            return 0
        sequences, seq_len, hidden = self.parts.hidden_shape
        return sequences * seq_len * hidden * self.parts.dtype.itemsize
