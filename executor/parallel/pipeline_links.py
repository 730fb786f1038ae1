"""What travels between the stages of a pipeline: hidden states one way, gradients the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.executor.parallel.groups import Groups
from flopwright.plan.schedules.actions import Action, ActionKind


@dataclass(slots=True)
class Links:
    """Messages from and to the other stages of this rank's pipeline.

    A send is only started: the sender computes on, and what it sent is kept until it has
    left. NCCL runs the messages of one communicator in the order in which either end starts
    them, so messages that may cross each other go through communicators of their own: hidden
    states and gradients, and of each those to a later stage and those to an earlier one
    (interleaved chunks go round, a V comes back).

    Attributes:
        shape: of one hidden state.
        states: by chunk, how many come into it, one behind the other (attention residuals).
    """

    groups: Groups
    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    states: tuple[int, ...] = ()
    _sending: list[tuple[Any, Tensor]] = field(default_factory=list)

    def shape_of(self, action: Action) -> tuple[int, int, int]:
        """Returns the shape of a message: what comes into a chunk, or its gradient."""
        if not self.states:
            return self.shape
        behind = action.kind in {ActionKind.SEND_FORWARD, ActionKind.RECV_BACKWARD}
        batch, seq, hidden = self.shape
        return (batch * self.states[action.chunk + behind], seq, hidden)

    def nbytes(self, action: Action) -> int:
        """Returns the bytes of a message."""
        return prod(self.shape_of(action)) * self.dtype.itemsize

    def send(self, action: Action, tensor: Tensor) -> None:
        """Starts sending `tensor` to the action's peer."""
        own = self.groups.coordinates["pp"]
        handle = self._handle(action, own, action.peer)
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, dst=self._rank(action.peer), group=handle)
        self._sending.append((work, tensor))

    def receive(self, action: Action) -> Tensor:
        """Returns what the action's peer sends."""
        handle = self._handle(action, action.peer, self.groups.coordinates["pp"])
        buffer = torch.empty(self.shape_of(action), dtype=self.dtype, device=self.device)
        dist.recv(buffer, src=self._rank(action.peer), group=handle)
        return buffer

    def finish(self) -> None:
        """Waits until everything has left."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _rank(self, stage: int) -> int:
        return self.groups.pp_forward.ranks[stage]

    def _handle(self, action: Action, source: int, target: int) -> Any:
        groups, later = self.groups, target > source
        if action.kind in {ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD}:
            return (groups.pp_forward if later else groups.pp_forward_up).handle
        return (groups.pp_backward_down if later else groups.pp_backward).handle
