"""Runs one rank's lowered list of actions: the executor's half of "one plan, two interpreters".

The list (flopwright.plan.lower) says what to do and in which order; this file knows how the
chunks of a pipeline compute and what travels between them, and hands every other kind of
action to its hook. Nothing is reordered: `Runner.log` equals the list after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.entry import entered
from flopwright.executor.parallel.groups import Groups
from flopwright.executor.parallel.pipeline_links import Links
from flopwright.executor.parallel.sums import Sums
from flopwright.kernels.gradients import OwedGradients, deferring
from flopwright.models.documents import Documents
from flopwright.plan.schedules.actions import Action, ActionKind

LossFn = Callable[..., Tensor]
Hook = Callable[[Action], None]
Key = tuple[int, int]  # chunk, micro-batch

ACTION_CLASSES: Final[dict[ActionKind, str]] = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward",
    ActionKind.BACKWARD_WEIGHT: "backward",
    ActionKind.RECOMPUTE: "recompute",
    ActionKind.SEND_FORWARD: "pp_comm",
    ActionKind.RECV_FORWARD: "pp_comm",
    ActionKind.SEND_BACKWARD: "pp_comm",
    ActionKind.RECV_BACKWARD: "pp_comm",
    ActionKind.OFFLOAD: "offload",
    ActionKind.FETCH: "offload",
    ActionKind.GATHER_WEIGHTS: "dp_comm",
    ActionKind.REDUCE_GRADIENTS: "dp_comm",
    ActionKind.OPTIMIZER_STEP: "optimizer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Token ids [sequences, seq_len], int64, and the ids that follow them.

    Attributes:
        documents: which attention does not leave; None: each sequence is one.
        weights: [sequences, seq_len] of the targets in the loss, on average 1 over a step of all
            ranks; None: all alike.
    """

    tokens: Tensor
    targets: Tensor
    documents: Documents | None = None
    weights: Tensor | None = None


class Around(Protocol):
    """What is entered around the compute of a chunk, by whoever manages what it saves."""

    def forward(self, chunk: int, microbatch: int) -> AbstractContextManager[None]:
        """Entered around a forward pass, the loss included."""
        ...

    def backward(self, chunk: int, microbatch: int) -> AbstractContextManager[None]:
        """Entered around a backward pass, and around each half of a split one."""
        ...


class Nothing:
    """Enters nothing."""

    def forward(self, chunk: int, microbatch: int) -> AbstractContextManager[None]:
        """Returns an empty context."""
        return nullcontext()

    def backward(self, chunk: int, microbatch: int) -> AbstractContextManager[None]:
        """Returns an empty context."""
        return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """What a rank runs its list with.

    Attributes:
        chunks: the module of each pipeline chunk this rank holds, in model order.
        num_chunks: chunks of the whole pipeline; the last one computes the loss.
        loss_fn: (logits, targets) -> mean nats a token; of weighted tokens their weights follow.
        fused_loss: the last chunk takes the targets and computes the loss itself.
        hidden_shape: [sequences, seq_len, hidden_size] of what travels between chunks.
        hidden_states: by chunk, how many of them come into it; () one into each.
        sums_held: by chunk, how many finished sums of attention residuals its stage has before.
        hooks: what serves the kinds of action other than compute and transfers.
        around: entered around the compute of a chunk.
    """

    chunks: Mapping[int, nn.Module]
    num_chunks: int
    loss_fn: LossFn
    hidden_shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    hooks: Mapping[ActionKind, Hook]
    around: Around = field(default_factory=Nothing)
    fused_loss: bool = False
    hidden_states: tuple[int, ...] = ()
    sums_held: tuple[int, ...] = ()


@dataclass(slots=True)
class Runner:
    """Executes a lowered list, step after step, on one rank.

    Attributes:
        log: the actions done since the step began.
        links: to the other stages.
        sums: what this rank keeps between its chunks; None where no chunk reads finished sums.
        peers: by the name of a send or receive, the stage at its other end.
    """

    actions: Sequence[Action]
    parts: StageParts
    groups: Groups
    timer: ActionTimer
    log: list[Action] = field(default_factory=list)
    links: Links = field(init=False)
    sums: Sums | None = field(init=False, default=None)
    peers: dict[str, int] = field(init=False)
    _handlers: dict[ActionKind, Hook] = field(init=False)
    _batch: Sequence[MicroBatch] = ()
    _inputs: dict[Key, Tensor] = field(default_factory=dict)
    _input_gradients: dict[Key, Tensor] = field(default_factory=dict)
    _edges: dict[Key, GradientEdge] = field(default_factory=dict)
    _gradients: dict[Key, Tensor] = field(default_factory=dict)
    _leaving: dict[tuple[ActionKind, Key], Tensor] = field(default_factory=dict)
    _owed: dict[Key, OwedGradients] = field(default_factory=dict)
    _losses: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.parts
        self.links = Links(
            self.groups, parts.hidden_shape, parts.dtype, parts.device, parts.hidden_states
        )
        if parts.sums_held:
            self.sums = Sums(parts.sums_held, sorted(parts.chunks))
        self._handlers = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.BACKWARD_INPUT: self._backward_input,
            ActionKind.BACKWARD_WEIGHT: self._backward_weight,
            ActionKind.RECV_FORWARD: self._receive_forward,
            ActionKind.SEND_FORWARD: self._send,
            ActionKind.RECV_BACKWARD: self._receive_backward,
            ActionKind.SEND_BACKWARD: self._send,
            **parts.hooks,
        }
        self.take(self.actions)

    def take(self, actions: Sequence[Action]) -> None:
        """Has the next steps follow another list of the same plan."""
        self.actions = actions
        self.peers = {str(a): a.peer for a in actions if a.peer >= 0}
        missing = {a.kind for a in actions} - set(self._handlers)
        assert not missing, f"nobody serves {sorted(missing)}"

    def run_step(self, batch: Sequence[MicroBatch]) -> Tensor | None:
        """Runs one optimizer step; returns the mean loss over micro-batches on the last chunk."""
        self.log.clear()
        self._losses.clear()
        self._batch = batch
        for action in self.actions:
            self._run(action)
            self.log.append(action)
        self.links.finish()
        owed = (self._owed, self._leaving, self._gradients, self._input_gradients)
        left = any((self._inputs, self._edges, self.sums, *owed))
        assert not left, "the list did not use every tensor"
        if not self._losses:
            return None
        return torch.stack([self._losses[m] for m in sorted(self._losses)]).mean()

    def _run(self, action: Action) -> None:
        try:
            with self.timer.action(str(action), ACTION_CLASSES[action.kind], self._bytes(action)):
                self._handlers[action.kind](action)
        except Exception as error:
            error.add_note(f"in action {action}")
            raise

    def _is_last(self, chunk: int) -> bool:
        return chunk == self.parts.num_chunks - 1

    def _forward(self, action: Action) -> None:
        chunk, microbatch = key = (action.chunk, action.microbatch)
        batch = self._batch[microbatch]
        # Nothing here holds the input: what the operators save of it may be moved away.
        source = batch.tokens if chunk == 0 else self._enter(key)
        with self.parts.around.forward(chunk, microbatch):
            out = self._output(key, source, batch)
        # The edge keeps the graph, not the output: what no backward needs is freed once sent.
        self._edges[key] = get_gradient_edge(out)
        if self._is_last(chunk):
            self._losses[microbatch] = out.detach()
        elif chunk + 1 in self.parts.chunks:
            self._inputs[chunk + 1, microbatch] = out.detach()
        else:
            self._leaving[ActionKind.SEND_FORWARD, key] = out.detach()

    def _output(self, key: Key, source: Tensor, batch: MicroBatch) -> Tensor:
        """Returns what a chunk hands on: hidden states, the loss where it is the last."""
        chunk, parts = key[0], self.parts
        module = parts.chunks[chunk]
        more: dict[str, Any] = {} if self.sums is None else {"sums": self.sums.enter(key)}
        if batch.documents is not None:
            more["documents"] = batch.documents
        if not self._is_last(chunk):
            if self.sums is None:
                out: Tensor = module(source, **more)
                return out
            out, *finished = module(source, known=parts.sums_held[chunk + 1], **more)
            self.sums.keep(key, finished)
        elif parts.fused_loss:
            assert batch.weights is None, "refused (executor/launch)"
            out = module(source, targets=batch.targets, **more)
        else:
            weights = () if batch.weights is None else (batch.weights,)
            out = parts.loss_fn(module(source, **more), batch.targets, *weights)
        return out

    def _backward(self, action: Action) -> None:
        key = (action.chunk, action.microbatch)
        with self.parts.around.backward(*key):
            roots = [(self._edges.pop(key), self._gradient(key))]
            if self.sums is not None:
                roots += self.sums.roots(key)
            edges, gradients = zip(*roots, strict=True)
            torch.autograd.backward(edges, gradients)
        self._hand_back(key)

    def _backward_input(self, action: Action) -> None:
        with deferring() as owed:
            self._backward(action)
        self._owed[action.chunk, action.microbatch] = owed

    def _backward_weight(self, action: Action) -> None:
        key = (action.chunk, action.microbatch)
        with self.parts.around.backward(*key):
            self._owed.pop(key).pay()

    def _gradient(self, key: Key) -> Tensor:
        """Returns the gradient that a chunk's backward pass begins with."""
        if self._is_last(key[0]):
            return torch.full_like(self._losses[key[1]], 1.0 / len(self._batch))
        return self._gradients.pop(key)

    def _hand_back(self, key: Key) -> None:
        """Gives the gradient of a chunk's input to the chunk before it."""
        if key[0] == 0:
            return
        chunk, microbatch = key
        gradient = self._input_gradients.pop(key)
        if chunk - 1 in self.parts.chunks:
            self._gradients[chunk - 1, microbatch] = gradient
        else:
            self._leaving[ActionKind.SEND_BACKWARD, key] = gradient

    def _enter(self, key: Key) -> Tensor:
        """Returns a chunk's input as the beginning of its graph."""
        return entered(self._inputs.pop(key), lambda g: self._input_gradients.update({key: g}))

    def _receive_forward(self, action: Action) -> None:
        self._inputs[action.chunk, action.microbatch] = self.links.receive(action)

    def _receive_backward(self, action: Action) -> None:
        self._gradients[action.chunk, action.microbatch] = self.links.receive(action)

    def _send(self, action: Action) -> None:
        key = (action.chunk, action.microbatch)
        self.links.send(action, self._leaving.pop((action.kind, key)))

    def _bytes(self, action: Action) -> int:
        return self.links.nbytes(action) if ACTION_CLASSES[action.kind] == "pp_comm" else 0
