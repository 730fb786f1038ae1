"""From rows of tokens to what a rank's chunks read: tensors, documents, weights in the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flopwright.executor.data.token_batch import (
    TokenBatch,
    document_bounds,
    positions_in_documents,
)
from flopwright.executor.parallel.pipeline import MicroBatch
from flopwright.executor.parallel.sharing import Sharing
from flopwright.models.documents import Documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What makes micro-batches of rows.

    Attributes:
        dtype: of weights in the loss.
    """

    sharing: Sharing
    device: torch.device
    dtype: torch.dtype

    def micro_batch(self, rows: TokenBatch, sequences: int | None = None) -> MicroBatch:
        """Returns what this rank reads of whole sequences [sequences, seq_len + 1].

        Args:
            sequences: of the step on all ranks, over which the weights are to be 1 on average;
                None leaves them as they are.
        """
        own = self.sharing.own_tokens
        tokens = torch.from_numpy(rows.tokens).to(self.device)
        return MicroBatch(
            tokens=own(tokens[:, :-1]).contiguous(),
            targets=own(tokens[:, 1:]).contiguous(),
            documents=None if rows.starts is None else self._documents(rows),
            weights=self._weights(rows, sequences),
        )

    def _documents(self, rows: TokenBatch) -> Documents:
        assert rows.starts is not None
        positions = torch.from_numpy(positions_in_documents(rows.starts)).to(self.device)
        return Documents(document_bounds(rows.starts), positions.flatten())

    def _weights(self, rows: TokenBatch, sequences: int | None) -> Tensor | None:
        if rows.weights is None:
            return None
        weights = rows.weights
        if sequences is not None:
            assert rows.total_weight is not None, "the step's weights have no sum"
            weights = weights * (sequences * weights.shape[-1] / max(rows.total_weight, 1e-30))
        moved = torch.from_numpy(weights).to(self.device, self.dtype)
        return self.sharing.own_tokens(moved).contiguous()
