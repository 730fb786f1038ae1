"""QK-Clip in training: the step's largest logits of all ranks become factors of the update.

The forward passes of a step record each head's largest logit. Ranks that saw other tokens of
the same heads agree on the maximum; tensor parallelism gives each rank heads of its own. The
factors then wait in `Trainable.row_factors`, which the optimizer multiplies into whatever it
has just updated (optimizers.py): weights, master copies, partitions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.executor.parallel.data_parallel.interface import Trainable
from flopwright.models.optim.qk_clip.module import RecordMaxLogits, row_factors
from flopwright.models.transformer.module import Stage


class QkClip:
    """Records from the moment it is made. Call `prepare` before each update.

    Attributes:
        seen: (largest logit, number of heads that exceeded tau) of the step among the heads
            whose weights this rank holds, each shape ().
    """

    def __init__(self, stages: Iterable[Stage], trainable: Trainable, tau: float) -> None:
        self._stages = tuple(stages)
        self._trainable, self._tau = trainable, tau
        self._recorder = RecordMaxLogits(*self._stages)
        self._recorder.__enter__()
        self.seen = (torch.tensor(float("-inf")), torch.tensor(0))

    def prepare(self) -> None:
        """Sets the next update's row factors from the step's maxima, and forgets these."""
        maxima = self._agreed()
        self._recorder.maxima.clear()
        factors = self._trainable.row_factors
        factors.clear()
        for stage in self._stages:
            held = {n: m for n, m in maxima.items() if n in stage.layer_numbers}
            factors.update(row_factors(stage, held, self._tau))
        if maxima:
            together = torch.stack(list(maxima.values()))
            self.seen = (together.amax(), (together > self._tau).sum())

    def _agreed(self) -> dict[int, Tensor]:
        """Returns the maxima over all tokens of the step, by layer; one message."""
        groups, mine = self._trainable.groups, self._recorder.maxima
        layers = sorted(mine)
        if not layers or groups.dp_cp.size == 1:
            return {layer: mine[layer] for layer in layers}
        together = torch.stack([self._of_all_heads(mine[layer]) for layer in layers])
        nbytes = together.numel() * together.element_size()
        with self._trainable.timer.action("qk_clip_maxima", "dp_comm", nbytes):
            dist.all_reduce(together, op=dist.ReduceOp.MAX, group=groups.dp_cp.handle)
        return dict(zip(layers, together.unbind(0), strict=True))

    def _of_all_heads(self, seen: Tensor) -> Tensor:
        """Returns the maxima of the heads whose weights this rank holds.

        Where context parallelism exchanges heads for tokens it saw a run of them only.
        """
        groups = self._trainable.groups
        heads = self._stages[0].spec.attention.num_heads // groups.tp.size
        if seen.numel() == heads:
            return seen
        assert seen.numel() * groups.cp.size == heads
        out = seen.new_full((heads,), float("-inf"))
        out[groups.cp.index * seen.numel() :][: seen.numel()] = seen
        return out
