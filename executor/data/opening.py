"""A run's data: prepared by one rank, opened by every reader; whole or streamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flopwright.executor.data.batches import Dataset, open_dataset
from flopwright.executor.data.domains import (
    chosen_weights,
    is_mixture,
    load_mixtures,
    quotas,
)
from flopwright.executor.data.mixture import MixedDataset, Part
from flopwright.executor.data.order import ramp_of
from flopwright.executor.data.prepare import prepare, prepare_mixture
from flopwright.executor.data.prepare_stream import prepare_streams
from flopwright.executor.data.stream import StreamedDataset, open_stream
from flopwright.executor.data.tokenizer import TokenizerKind
from flopwright.spec.model import ModelSpec
from flopwright.spec.workload import Workload

RunData = Dataset | MixedDataset | StreamedDataset


def prepare_data(
    text: Path | None,
    model: ModelSpec,
    workload: Workload,
    folder: Path,
    tokenizer: TokenizerKind,
    *,
    stream: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> None:
    """Writes into `folder` what `open_data` opens; one process calls it.

    Args:
        text: see `sources.find_source`, or a file of domains and mixtures.
        stream: of the text only a sample is read here.

    Raises:
        InputError: the text cannot be used.
    """
    mixture = text is not None and is_mixture(text)
    if stream:
        texts: dict[str, Path | None] = {"": text}
        if text is not None and mixture:
            domains = load_mixtures(text).domains
            texts = {name: text.parent / where for name, where in domains.items()}
        prepare_streams(texts, model.vocab_size, folder, tokenizer, progress)
    elif text is not None and mixture:
        prepare_mixture(text, model, folder, tokenizer, progress)
    else:
        prepare(text, model, workload, folder, tokenizer, progress)


def open_data(
    text: Path | None,
    folder: Path,
    workload: Workload,
    vocab_size: int | None = None,
    *,
    stream: bool = False,
    share: tuple[int, int] = (0, 1),
) -> RunData:
    """Returns a run's data as `workload` reads it.

    Args:
        share: (this reader's number, how many there are), of a streamed text.

    Raises:
        InputError: files are missing or broken, or there is no such mixture.
    """

    def part(where: Path) -> Part:
        if stream:
            return open_stream(where, workload, vocab_size, share)
        return open_dataset(where, workload, vocab_size)

    if text is None or not is_mixture(text):
        return part(folder)
    shares = quotas(chosen_weights(load_mixtures(text), workload.mixture, text))
    parts = tuple(part(folder / name) for name in shares)
    return MixedDataset(
        folder=folder,
        meta=parts[0].meta,
        parts=parts,
        shares=tuple(shares.values()),
        names=tuple(shares),
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        seed=workload.seed,
        ramp=ramp_of(workload),
    )
