"""A run's checkpoint becomes a folder in the layout and format of a release."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flopwright.errors import InputError, Violation
from flopwright.executor.checkpoint.boxes import whole
from flopwright.executor.checkpoint.load import check_files, checkpoint_tokenizer
from flopwright.executor.checkpoint.manifest import Manifest, find_checkpoint, read_manifest
from flopwright.executor.checkpoint.storage_read import read_slices
from flopwright.models.formats.mx import ScaleRule
from flopwright.models.formats.plan import TARGET_NAMES, nothing_covered, target_layout
from flopwright.models.hf.write import DEFAULT_SHARD_BYTES, write_checkpoint
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import parameters


@dataclass(frozen=True, slots=True)
class Released:
    """A release that was written: of which step folder, its files and their bytes."""

    step_folder: Path
    step: int
    files: int
    nbytes: int


def release_run(
    path: Path,
    out: Path,
    to: str,
    *,
    step: int | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    rule: ScaleRule = "floor",
) -> Released:
    """Writes the weights of a run's checkpoint as a release, its tokenizer beside them.

    One stacked tensor of the checkpoint and one output file are in memory at a time.

    Args:
        path: a run's folder, one of its checkpoints, or a step folder.
        out: folder to write; must not exist, or be empty.
        to: one of `TARGET_NAMES`; weights that it does not cover become bf16.
        step: which saved step; the latest by default.
        rule: how MXFP4's scales are chosen.

    Raises:
        InputError: no checkpoint, a broken one, a model without a released layout, or one that
            does not fit the format.
    """
    if to not in TARGET_NAMES:
        rule_, limit = "no such format is written", ", ".join(TARGET_NAMES)
        raise InputError(Violation(field="--to", value=to, rule=rule_, limit=limit))
    where = find_checkpoint(path, step)
    manifest = read_manifest(where)
    _check_covers(to, manifest.model)
    check_files(where, manifest.files)
    tokenizer = checkpoint_tokenizer(where, manifest)
    write_checkpoint(
        out,
        manifest.model,
        _weights(where, manifest),
        max_shard_bytes=max_shard_bytes,
        dtype=torch.bfloat16,
        release=to,
        rule=rule,
        beside=(tokenizer,),
    )
    files = [p.stat().st_size for p in out.glob("*.safetensors")]
    return Released(where, manifest.step, len(files), sum(files))


def _check_covers(to: str, model: ModelSpec) -> None:
    """Refuses a format whose releases quantise nothing that the model has."""
    target = target_layout(to, "")
    if target is not None and not any(p.role in target.format.roles for p in parameters(model)):
        raise nothing_covered(target)


def _weights(where: Path, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yields the model's weights, read one at a time from files that have been checked."""
    stored = manifest.tensors()
    for p in parameters(manifest.model):
        if p.tied:
            continue
        entry = stored.get(p.name)
        if entry is None:
            rule, fix = "the checkpoint has no such weight", "use an earlier checkpoint"
            raise InputError(Violation(file=str(where), field=p.name, rule=rule, nearest_fix=fix))
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        read_slices(where, manifest, {p.name: (whole(tensor),)})
        yield p.name, tensor
