"""What a streamed text needs before its first step: its pieces, a tokenizer, held-out text.

Of the text only a sample is read: so many pieces, drawn by a fixed order, that they hold 16 MiB.
The tokenizer is learnt from it. Held out are the documents whose number by content is below a
bound, wherever in the text they are; those of the sample are what the held-out loss is taken of.
Equal documents are not looked for, but all of them stand on the same side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.executor.data.batches import (
    HELD_OUT_FILE,
    HELD_OUT_STARTS_FILE,
    TOKENIZER_FILE,
)
from flopwright.executor.data.encode import encode_documents
from flopwright.executor.data.pieces import Piece, find_pieces, write_pieces
from flopwright.executor.data.split import (
    HELD_OUT_SHARE,
    MAX_HELD_OUT_SHARE,
    MIN_HELD_OUT_BYTES,
    content_number,
)
from flopwright.executor.data.stream import PIECES_FILE, STREAM_FILE, StreamMeta
from flopwright.executor.data.tape import piece_order
from flopwright.executor.data.tokenizer import (
    Tokenizer,
    TokenizerKind,
    tokenizer_hash,
    train_bpe,
    train_characters,
)

SAMPLE_BYTES: Final = 16 * 2**20
_SAMPLE_SEED: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """A text's pieces and what was read of it."""

    pieces: tuple[Piece, ...]
    source: str
    documents: tuple[str, ...]
    held_out_below: int


def prepare_streams(
    texts: Mapping[str, Path | None],
    vocab_size: int,
    out_dir: Path,
    tokenizer_kind: TokenizerKind = "bpe",
    progress: Callable[[str, float], None] | None = None,
) -> None:
    """Prepares texts to be streamed, each in the folder of `out_dir` that is its name.

    They share a tokenizer. The name "" stands for `out_dir` itself.

    Raises:
        InputError: no text, one document alone, a broken record, or see `tokenizer.train_bpe`.
    """
    say = progress or (lambda phase, share: None)
    say("read", 0.0)
    sampled = {name: _sample(text) for name, text in texts.items()}
    say("tokenizer", 0.0)
    trainer = train_bpe if tokenizer_kind == "bpe" else train_characters
    documents = [text for found in sampled.values() for text in found.documents]
    tokenizer: Tokenizer = trainer(documents, vocab_size)
    for i, (name, found) in enumerate(sampled.items()):
        say("tokens", i / len(sampled))
        _write(out_dir / name, found, tokenizer, vocab_size)
    (out_dir / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8")
    say("tokens", 1.0)


def _sample(path: Path | None) -> _Sampled:
    pieces, source = find_pieces(path)
    documents: list[str] = []
    read = 0
    for number in piece_order(len(pieces), _SAMPLE_SEED, 0):
        for text in pieces[number].documents():
            documents.append(text)
            read += len(text.encode())
        if read >= SAMPLE_BYTES:
            break
    bound = held_out_bound(documents)
    if bound is None:
        raise InputError(
            Violation(
                field="--stream",
                value=source,
                rule="a text is streamed by documents, and of this one too few were found "
                f"({len(set(documents))})",
                nearest_fix="leave --stream out, or pass a folder, .jsonl or .parquet file",
            )
        )
    return _Sampled(pieces=pieces, source=source, documents=tuple(documents), held_out_below=bound)


def held_out_bound(documents: Sequence[str]) -> int | None:
    """Returns below which number by content documents are held out; None for fewer than two.

    About 2 % of the bytes, at least 16 KiB where that is no more than 10 %, and never all.
    """
    sizes = {content_number(text): len(text.encode()) for text in documents}
    total, held = sum(sizes.values()), 0
    wanted = min(max(HELD_OUT_SHARE * total, MIN_HELD_OUT_BYTES), MAX_HELD_OUT_SHARE * total)
    numbers = sorted(sizes)
    for number in numbers[:-1]:
        held += sizes[number]
        if held >= wanted or number == numbers[-2]:
            return number + 1
    return None


def _write(folder: Path, found: _Sampled, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Writes the files beside the target and moves them in; stream.json comes last."""
    bound = found.held_out_below
    held = list(dict.fromkeys(t for t in found.documents if content_number(t) < bound))
    encoded = encode_documents(held, tokenizer, vocab_size)
    meta = StreamMeta(
        source=found.source,
        pieces=len(found.pieces),
        sampled_bytes=sum(len(text.encode()) for text in found.documents),
        tokenizer_kind=tokenizer.kind,
        tokenizer_hash=tokenizer_hash(tokenizer),
        vocab_size=vocab_size,
        held_out_below=bound,
        held_out_tokens=len(encoded.tokens),
    )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".data-", dir=folder) as temporary:
        there = Path(temporary)
        np.save(there / HELD_OUT_FILE, encoded.tokens, allow_pickle=False)
        np.save(there / HELD_OUT_STARTS_FILE, encoded.starts, allow_pickle=False)
        write_pieces(there / PIECES_FILE, found.pieces)
        (there / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8")
        (there / STREAM_FILE).write_text(meta.model_dump_json(indent=1), encoding="utf-8")
        for name in (
            HELD_OUT_FILE,
            HELD_OUT_STARTS_FILE,
            PIECES_FILE,
            TOKENIZER_FILE,
            STREAM_FILE,
        ):
            (there / name).replace(folder / name)
