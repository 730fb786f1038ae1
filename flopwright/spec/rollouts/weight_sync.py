"""How new weights reach the engines: what moves, over which path, in what pieces."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from flopwright.spec.base import Spec
from flopwright.units import Bytes, BytesPerS, Seconds

MAX_RANKS: Final = 10_000_000
RankCount = Annotated[PositiveInt, Field(le=MAX_RANKS)]
WeightBytes = Annotated[Bytes, Field(gt=0, le=2**60)]
SyncPath = Literal["broadcast", "p2p", "gather_broadcast", "relay", "storage"]


class WeightSyncPlan(Spec):
    """One synchronisation of the engines with the trainer.

    Attributes:
        path: how full weights travel. "broadcast": every rank of the engines holds a part (on
            the host or its GPU) and broadcasts it to all. "p2p": every sending rank writes to
            each engine what that engine's ranks need of it. "gather_broadcast": shards are
            gathered to full tensors inside `shard_group`, then one rank a stage sends them to
            all, stage after stage. "relay": one push of the whole from the trainer into the
            memory of a relay; engines pull beside generation. "storage": written to and read
            from the shared file system.
        weight_bytes: the full parameter set in the format the engines take.
        tensors: how many tensors it is; each costs `tensor_s` when it is loaded.
        bucket_bytes: tensors travel in buckets of so many bytes; None: tensor by tensor.
        source: where the new weights stand when the clock starts: on GPUs, in the memory of
            their hosts, or in that of other hosts, from where adapters fetch it.
        senders: ranks that hold them; receivers: ranks of all engines together.
        engine_ranks: ranks of one engine, each of which keeps 1 / engine_ranks of the weights.
        stages: ranks of a pipeline's stages that send one after the other (gather_broadcast).
        shard_group: ranks over which a tensor is cut before it is gathered.
        pipelined: the copy, the broadcast and the load of different buckets run together; it
            takes room for two buckets beside weights and cache. Otherwise one after another.
        changed_share: share of the bytes that changed and travels ("delta"); the rest stays.
        tensor_s: time of the loader for one tensor (look up, cut, copy).
        bucket_s: time to start one bucket.
        fixed_s: what does not depend on bytes: pausing, barriers, metadata.
        rate_bytes_per_s: measured rate of the push, in place of the link's.
    """

    path: SyncPath
    weight_bytes: WeightBytes = Field(alias="weights")
    tensors: Annotated[PositiveInt, Field(le=10**8)]
    bucket_bytes: WeightBytes | None = Field(default=None, alias="bucket")
    source: Literal["host", "gpu", "remote"] = "gpu"
    senders: RankCount
    receivers: RankCount
    engine_ranks: RankCount
    stages: RankCount = 1
    shard_group: RankCount = 1
    pipelined: bool = False
    changed_share: float = Field(default=1.0, gt=0, le=1)
    tensor_s: Seconds = Field(default=50e-6, alias="per_tensor")
    bucket_s: Seconds = Field(default=1e-3, alias="per_bucket")
    fixed_s: Seconds = Field(default=0.0, alias="fixed")
    rate_bytes_per_s: BytesPerS | None = Field(default=None, alias="rate")

    @property
    def moved_bytes(self) -> float:
        """Bytes of one copy that travel."""
        return self.weight_bytes * self.changed_share

    @property
    def pieces(self) -> int:
        """Buckets (tensors, where there are none) of one copy."""
        if self.bucket_bytes is None:
            return self.tensors
        return max(1, -(-round(self.moved_bytes) // self.bucket_bytes))

    @model_validator(mode="after")
    def _shape(self) -> Self:
        if self.receivers % self.engine_ranks:
            raise ValueError(
                f"receivers ({self.receivers}) must be a multiple of engine_ranks "
                f"({self.engine_ranks}): whole engines"
            )
        if self.senders % self.stages:
            raise ValueError(f"stages ({self.stages}) must divide senders ({self.senders})")
        if self.rate_bytes_per_s is not None and self.rate_bytes_per_s <= 0:
            raise ValueError("rate must be above zero")
        return self
