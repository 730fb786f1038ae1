"""Checkpoints in the released layouts: modules in and out, and the streams beneath.

Layouts: DeepSeek-V3 and Kimi K2, Kimi Linear, Kimi K3, Llama, Qwen2, Qwen3, Qwen3-MoE, Mixtral,
GLM-4.5, MiniMax-M2, gpt-oss, GPT-2; weights plain, or in a format of `models/formats`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from flopwright.errors import InputError, Violation
from flopwright.models.hf.read import Checkpoint, open_checkpoint, read_tensors
from flopwright.models.hf.write import DEFAULT_SHARD_BYTES, TensorRows, write_checkpoint
from flopwright.models.moe.module import Experts
from flopwright.models.transformer.module import Stage

__all__ = [
    "Checkpoint",
    "TensorRows",
    "load_stage_",
    "open_checkpoint",
    "read_tensors",
    "save_stage",
    "stage_tensors",
    "write_checkpoint",
]


def _experts(stage: Stage) -> range | None:
    """Returns the global numbers of the experts that a stage holds, None without any."""
    blocks = [m for m in stage.modules() if isinstance(m, Experts)]
    if not blocks:
        return None
    first, count = blocks[0].first_expert, blocks[0].gate_up_proj.shape[0]
    return range(first, first + count)


def stage_tensors(stage: Stage) -> Iterator[tuple[str, Tensor | TensorRows]]:
    """Yields a stage's weights and selection biases, as `write_checkpoint` takes them."""
    experts = _experts(stage)
    for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
        stacked = experts is not None and ".mlp.experts." in name
        first = experts.start if experts is not None and stacked else 0
        yield name, TensorRows(tensor, first) if stacked else tensor


def save_stage(
    stage: Stage,
    folder: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    release: str = "bf16",
) -> None:
    """Writes a stage that holds a whole model; see `write_checkpoint`."""
    write_checkpoint(
        folder,
        stage.spec,
        stage_tensors(stage),
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
        release=release,
    )


@torch.no_grad()
def load_stage_(stage: Stage, folder: Path) -> None:
    """Fills a stage's weights from a checkpoint, cast to the stage's own dtypes.

    Only the layers and experts that the stage holds are read.

    Raises:
        InputError: a checkpoint that is broken, or of another model than the stage's.
    """
    checkpoint = open_checkpoint(folder, stage.spec)
    targets = dict((*stage.named_parameters(), *stage.named_buffers()))
    layers, dtype = stage.layer_numbers, next(stage.parameters()).dtype
    stream = read_tensors(checkpoint, layers=layers, experts=_experts(stage), dtype=dtype)
    for name, tensor in stream:
        targets.pop(name).copy_(tensor)
    tied = stage.lm_head is not None and stage.spec.tied_embeddings
    if tied and not stage.has_embedding:  # this rank's copy of a table held elsewhere
        tables = dict(read_tensors(checkpoint, layers=[-1]))
        targets.pop("lm_head.weight").copy_(tables["model.embed_tokens.weight"])
    if targets:
        raise InputError(
            [
                Violation(file=str(folder), field=name, rule="the checkpoint has no such tensor")
                for name in sorted(targets)
            ]
        )
