"""A conversion planned and checked: what is read, what is written, how many bytes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.models.formats.layout import Layout
from flopwright.models.formats.plan import (
    ShardPlan,
    free_bytes,
    kept_modules,
    plan_moves,
    plan_shards,
    target_layout,
)
from flopwright.models.formats.quantization_config import (
    layout_of,
    quantization_config,
    with_format,
)
from flopwright.models.formats.stored import StoredWeight, spans_of, stored_weights
from flopwright.models.hf.config import CONFIG_FILE
from flopwright.models.hf.fields import read_json
from flopwright.models.hf.files import INDEX_FILE, raise_all, read_headers

DEFAULT_SHARD_BYTES: Final = 5_000_000_000
# Beside weights: tokenizers, generation settings, licences. Nothing that unpickles or holds
# weights in another form.
_BESIDE: Final = frozenset({".json", ".jinja", ".md", ".model", ".py", ".tiktoken", ".txt", ""})
_WRITTEN: Final = frozenset({CONFIG_FILE, INDEX_FILE})


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion that has passed every check that needs no weights.

    Attributes:
        source: layout that the weights are in, None where they are not quantised.
        target: layout that they get.
        config: config.json to write.
        beside: files that are copied.
        read_bytes: bytes of the tensors read.
        checked: whether names and shapes were held against the model of config.json.
    """

    folder: Path
    out: Path
    source: Layout | None
    target: Layout | None
    config: dict[str, Any]
    shards: tuple[ShardPlan, ...]
    beside: tuple[Path, ...]
    read_bytes: int
    checked: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors to write."""
        return sum(move.nbytes for shard in self.shards for move in shard.moves)

    @property
    def counts(self) -> tuple[int, int]:
        """Weights that are in the target format, and all others."""
        moves = [m for shard in self.shards for m in shard.moves]
        quantised = sum(m.target is not None for m in moves)
        return quantised, len(moves) - quantised


def plan_job(
    folder: Path, out: Path, to: str, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Job:
    """Returns a conversion of a checkpoint folder.

    Args:
        folder: config.json beside safetensors files.
        out: folder to write; must not exist, or be empty.
        to: one of `plan.TARGET_NAMES`.
        max_shard_bytes: most bytes of tensors in one file.

    Raises:
        InputError: everything that is wrong with the folder, as far as headers tell.
    """
    _check_out(out)
    config_file = folder / CONFIG_FILE
    config = read_json(config_file)
    target = target_layout(to, str(config.get("model_type", "")))
    source = layout_of(config, str(config_file))
    headers, _ = read_headers(folder)
    spans, twice = spans_of(headers)
    weights, problems = stored_weights(spans, source)
    raise_all(twice + problems)
    checked = _check_model(folder, config, weights)
    moves = plan_moves(weights, target)
    kept = kept_modules(moves)
    said = None if target is None else quantization_config(target, kept)
    return Job(
        folder=folder,
        out=out,
        source=source,
        target=target,
        config=_config(config, said, any(m.outputs.get("") and not m.copied for m in moves)),
        shards=plan_shards(moves, max_shard_bytes),
        beside=tuple(
            p
            for p in sorted(folder.iterdir())
            if p.is_file() and p.suffix in _BESIDE and p.name not in _WRITTEN
            and not p.name.startswith(".") and not p.name.endswith(".index.json")
        ),
        read_bytes=sum(w.nbytes for w in weights),
        checked=checked,
    )  # fmt: skip


def check_space(job: Job) -> None:
    """Refuses a job whose output does not fit on the disk.

    Raises:
        InputError: it does not.
    """
    free = free_bytes(job.out)
    if free < job.nbytes:
        rule = "not enough room on the disk"
        limit = f"{free:,} bytes are free"
        raise InputError(
            Violation(file=str(job.out), value=f"{job.nbytes:,} bytes", rule=rule, limit=limit)
        )


def _check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        rule, fix = "there is something here already", "name a new folder"
        raise InputError(Violation(file=str(out), rule=rule, nearest_fix=fix))


def _config(config: dict[str, Any], said: dict[str, Any] | None, narrowed: bool) -> dict[str, Any]:
    """Returns the config of the target format; its dtype is bf16 where weights became that."""
    out = with_format(config, said)
    if narrowed:
        inner = out.get("text_config")
        for place in (out, inner) if isinstance(inner, dict) else (out,):
            for key in ("dtype", "torch_dtype"):
                if key in place:
                    place[key] = "bfloat16"
    return out


def _check_model(folder: Path, config: dict[str, Any], weights: list[StoredWeight]) -> bool:
    """Holds names and shapes against the model, where its family is known; returns whether.

    Raises:
        InputError: a tensor is missing, unexpected or of a wrong shape.
    """
    from flopwright.models.hf.check import check_weights
    from flopwright.models.hf.config import model_from_hf_config
    from flopwright.models.hf.families import FAMILIES

    if config.get("model_type") not in FAMILIES:
        return False
    spec = model_from_hf_config(folder / CONFIG_FILE)
    raise_all(check_weights(folder, spec, weights, config))
    return True
