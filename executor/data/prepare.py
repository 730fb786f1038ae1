"""From text to the files that every rank reads; done once a run, cached by content.

The cache lies under ${FLOPWRIGHT_HOME:-~/.local/share/flopwright}/data. Its key is the
sha256 of the documents, the tokenizer kind and the vocabulary, so equal text is tokenised
once a machine. The run's folder gets its own names for the same files and stays complete
when the cache is deleted.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.executor.data.batches import (
    DATA_FILES,
    HELD_OUT_FILE,
    HELD_OUT_STARTS_FILE,
    META_FILE,
    TOKENIZER_FILE,
    TRAIN_FILE,
    TRAIN_STARTS_FILE,
    DataMeta,
    Dataset,
    open_dataset,
)
from flopwright.executor.data.domains import load_mixtures
from flopwright.executor.data.encode import Encoded, encode_documents
from flopwright.executor.data.split import Split, split_documents
from flopwright.executor.data.text import TextCorpus, load_text
from flopwright.executor.data.tokenizer import (
    Tokenizer,
    TokenizerKind,
    tokenizer_hash,
    train_bpe,
    train_characters,
)
from flopwright.spec.model import ModelSpec
from flopwright.spec.workload import Workload

Progress = Callable[[str, float], None]
CACHE_VERSION: Final = 2


def prepare(
    text: Path | None,
    spec: ModelSpec,
    workload: Workload,
    out_dir: Path,
    tokenizer_kind: TokenizerKind = "bpe",
    progress: Progress | None = None,
) -> Dataset:
    """Returns the data of a run, its files in `out_dir`.

    One process calls this; the others call `batches.open_dataset(out_dir, workload)`
    afterwards.

    Args:
        text: see `text.load_text`; None is the Python standard library.
        spec: its vocab_size fixes the tokenizer's size.
        workload: sequence length, batch and seed of the order.
        out_dir: folder of the files; made if missing, replaced file by file.
        tokenizer_kind: "bpe" or "characters".
        progress: called with a phase ("read", "tokenizer", "tokens") and its share done.

    Raises:
        InputError: see `text.load_text` and `tokenizer.train_bpe`.
    """
    say = progress or (lambda phase, share: None)
    say("read", 0.0)
    corpus = load_text(text)
    say("read", 1.0)
    text_hash = hash_documents(corpus.documents)
    key = f"{text_hash[:24]}-{tokenizer_kind}-{spec.vocab_size}-v{CACHE_VERSION}"
    cached = cache_folder() / "data" / key
    if not _usable(cached, workload, spec.vocab_size):
        made = _make(corpus, text_hash, spec.vocab_size, tokenizer_kind, cached, out_dir, say)
        if made == out_dir:
            return open_dataset(out_dir, workload, spec.vocab_size)
    say("tokens", 1.0)
    _link_files(cached, out_dir)
    return open_dataset(out_dir, workload, spec.vocab_size)


def prepare_mixture(
    path: Path,
    spec: ModelSpec,
    out_dir: Path,
    tokenizer_kind: TokenizerKind = "bpe",
    progress: Progress | None = None,
) -> None:
    """Prepares every domain of a file of mixtures, each in a folder of `out_dir` by its name.

    The tokenizer is that of all domains together, whichever of them a mixture takes.

    Raises:
        InputError: as `prepare`, for any domain.
    """
    say = progress or (lambda phase, share: None)
    say("read", 0.0)
    names = load_mixtures(path).domains
    corpora = {name: load_text(path.parent / text) for name, text in names.items()}
    say("tokenizer", 0.0)
    trainer = train_bpe if tokenizer_kind == "bpe" else train_characters
    documents = [text for corpus in corpora.values() for text in corpus.documents]
    tokenizer: Tokenizer = trainer(documents, spec.vocab_size)
    for i, (name, corpus) in enumerate(corpora.items()):
        say("tokens", i / len(corpora))
        split = split_documents(corpus.documents)
        train = encode_documents(split.train, tokenizer, spec.vocab_size)
        held_out = encode_documents(split.held_out, tokenizer, spec.vocab_size)
        digest = hash_documents(corpus.documents)
        sizes = (len(train.tokens), len(held_out.tokens))
        meta = _meta(corpus, digest, split, tokenizer, spec.vocab_size, *sizes)
        _write(out_dir / name, train, held_out, tokenizer, meta)
    (out_dir / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8")
    say("tokens", 1.0)


def cache_folder() -> Path:
    """Returns ${FLOPWRIGHT_HOME}, by default ~/.local/share/flopwright."""
    home = os.environ.get("FLOPWRIGHT_HOME")
    return Path(home) if home else Path.home() / ".local" / "share" / "flopwright"


def hash_documents(documents: Sequence[str]) -> str:
    """Returns the sha256 (hex) of the documents, their order and their boundaries."""
    digest = hashlib.sha256()
    for text in documents:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _usable(folder: Path, workload: Workload, vocab_size: int) -> bool:
    """Returns whether the cache entry is there and whole; a broken one is made again."""
    try:
        open_dataset(folder, workload, vocab_size)
    except InputError:
        return False
    return True


def _make(
    corpus: TextCorpus,
    text_hash: str,
    vocab_size: int,
    kind: TokenizerKind,
    cached: Path,
    out_dir: Path,
    say: Progress,
) -> Path:
    """Makes the files in the cache, or in `out_dir` where the cache cannot be written."""
    say("tokenizer", 0.0)
    trainer = train_bpe if kind == "bpe" else train_characters
    tokenizer: Tokenizer = trainer(corpus.documents, vocab_size)
    say("tokenizer", 1.0)
    split = split_documents(corpus.documents)
    train = encode_documents(split.train, tokenizer, vocab_size, lambda s: say("tokens", s))
    held_out = encode_documents(split.held_out, tokenizer, vocab_size)
    if len(train.tokens) < 2 or not len(held_out.tokens):
        raise InputError(
            Violation(
                field="--text",
                value=corpus.source,
                rule="the text is too short: nothing follows its only token",
                nearest_fix="pass more text",
            )
        )
    sizes = (len(train.tokens), len(held_out.tokens))
    meta = _meta(corpus, text_hash, split, tokenizer, vocab_size, *sizes)
    for target in (cached, out_dir):
        try:
            _write(target, train, held_out, tokenizer, meta)
        except PermissionError:
            if target == out_dir:
                raise
            continue
        return target
    raise AssertionError("unreachable")


def _meta(
    corpus: TextCorpus,
    text_hash: str,
    split: Split,
    tokenizer: Tokenizer,
    vocab_size: int,
    train_tokens: int,
    held_out_tokens: int,
) -> DataMeta:
    return DataMeta(
        source=corpus.source,
        text_hash=text_hash,
        text_size=corpus.text_bytes,
        documents=len(corpus.documents),
        duplicates=split.duplicates,
        skipped_files=corpus.skipped,
        truncated=corpus.truncated,
        split_rule=split.rule,
        tokenizer_kind=tokenizer.kind,
        tokenizer_hash=tokenizer_hash(tokenizer),
        vocab_size=vocab_size,
        train_tokens=train_tokens,
        held_out_tokens=held_out_tokens,
    )


def _write(
    folder: Path, train: Encoded, held_out: Encoded, tokenizer: Tokenizer, meta: DataMeta
) -> None:
    """Writes the files beside the target and moves them in; meta.json comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".data-", dir=folder) as temporary:
        there = Path(temporary)
        for name, array in (
            (TRAIN_FILE, train.tokens),
            (HELD_OUT_FILE, held_out.tokens),
            (TRAIN_STARTS_FILE, train.starts),
            (HELD_OUT_STARTS_FILE, held_out.starts),
        ):
            np.save(there / name, array, allow_pickle=False)
        (there / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8")
        (there / META_FILE).write_text(meta.model_dump_json(indent=1), encoding="utf-8")
        for name in DATA_FILES:
            (there / name).replace(folder / name)


def _link_files(source: Path, target: Path) -> None:
    """Gives the files names in `target`: hard links, or copies on another file system."""
    target.mkdir(parents=True, exist_ok=True)
    for name in DATA_FILES:
        temporary = target / f".{name}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        try:
            os.link(source / name, temporary)
        except OSError:
            shutil.copyfile(source / name, temporary)
        temporary.replace(target / name)
