"""Text to token ids and back: a byte-level BPE with reserved special ids, or characters.

Layout of the BPE's ids, as in Kimi K2's tokenizer: first the ranks (256 bytes, then the
merges), then a block of 256 special ids. The named ones stand at K2's offsets in the
block, so chat templates need no new embeddings later. Special ids are never made out of
plain text: "<|im_end|>" in a document is encoded as ordinary bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

from tokenizers import AddedToken, decoders, pre_tokenizers, trainers
from tokenizers import Tokenizer as BpeEngine
from tokenizers.models import BPE

from flopwright.errors import InputError, Violation

TokenizerKind = Literal["bpe", "characters"]
NUM_SPECIAL: Final = 256
NUM_BYTES: Final = 256
MAX_TOKENIZER_BYTES: Final = 128 * 2**20
# Offsets in the special block: those of Kimi K2's tokenizer (163,584 ranks).
SPECIAL_OFFSETS: Final[dict[str, int]] = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<|im_middle|>": 17,
    "[UNK]": 254,
    "[PAD]": 255,
}


def special_names() -> tuple[str, ...]:
    """Returns the 256 names of the special block, in id order."""
    named = {offset: name for name, offset in SPECIAL_OFFSETS.items()}
    return tuple(named.get(i, f"<|reserved_{i}|>") for i in range(NUM_SPECIAL))


class Tokenizer(Protocol):
    """What the rest of the executor needs of a tokenizer."""

    @property
    def kind(self) -> TokenizerKind:
        """ "bpe" or "characters"."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, specials included."""

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document; None where there is none."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of plain text; no special id is ever among them."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids; special ids give nothing."""

    def to_json(self) -> str:
        """Returns the contents of tokenizer.json."""


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Returns the sha256 (hex) of tokenizer.json."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


class BpeTokenizer:
    """Byte-level BPE over the `tokenizers` library."""

    kind: Final = "bpe"

    def __init__(self, engine: BpeEngine) -> None:
        # Text that spells a special token's name is text: no injection from documents.
        engine.encode_special_tokens = True
        self._engine = engine
        self.vocab_size: int = engine.get_vocab_size(with_added_tokens=True)
        self.num_ranks = self.vocab_size - NUM_SPECIAL

    @property
    def eos_id(self) -> int:
        """The id of [EOS]."""
        return self.special_id("[EOS]")

    def special_id(self, name: str) -> int:
        """Returns the id of a named special token."""
        return self.num_ranks + SPECIAL_OFFSETS[name]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of plain text."""
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text."""
        return [
            e.ids for e in self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._engine.decode(list(ids), skip_special_tokens=True)
        return text

    def to_json(self) -> str:
        """Returns the library's own tokenizer.json."""
        text: str = self._engine.to_str()
        return text


class CharacterTokenizer:
    """One id a distinct character, in code point order."""

    kind: Final = "characters"
    eos_id: Final = None

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.vocab_size = len(characters)
        self._ids = {c: i for i, c in enumerate(characters)}

    def encode(self, text: str) -> list[int]:
        """Returns one id a character.

        Raises:
            InputError: a character that the training text did not have.
        """
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise InputError(
                Violation(
                    rule="characters that the training text does not have",
                    value=" ".join(map(repr, unknown[:8])),
                    nearest_fix=f"known: {self.characters!r}",
                )
            )
        return [self._ids[c] for c in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text."""
        return [self.encode(t) for t in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the characters of the ids."""
        return "".join(self.characters[i] for i in ids)

    def to_json(self) -> str:
        """Returns the characters as JSON."""
        return json.dumps({"flopwright_tokenizer": 1, "characters": self.characters})


def train_bpe(documents: Sequence[str], vocab_size: int) -> BpeTokenizer:
    """Returns a BPE of `vocab_size` ids: vocab_size - 256 ranks learned here, then the specials.

    Raises:
        InputError: a vocabulary below 512, or a text too small to fill the ranks.
    """
    ranks = vocab_size - NUM_SPECIAL
    if ranks < NUM_BYTES:
        raise _vocabulary(
            vocab_size,
            "a byte-level BPE needs 256 bytes and 256 special ids",
            f"use at least {NUM_BYTES + NUM_SPECIAL}, or --tokenizer characters",
        )
    engine = BpeEngine(BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ranks,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(documents, trainer, length=len(documents))
    found = engine.get_vocab_size()
    if found < ranks:
        raise _vocabulary(
            vocab_size,
            f"the text gives only {found} of {ranks} BPE ranks",
            f"pass more text, use vocab_size {found + NUM_SPECIAL}, or --tokenizer characters",
        )
    engine.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special_names()]
    )
    return BpeTokenizer(engine)


def train_characters(documents: Sequence[str], vocab_size: int) -> CharacterTokenizer:
    """Returns the tokenizer of the text's distinct characters.

    Raises:
        InputError: there are more than `vocab_size` of them.
    """
    characters = "".join(sorted(set().union(*documents)))
    if len(characters) > vocab_size:
        raise _vocabulary(
            vocab_size,
            f"the text has {len(characters)} distinct characters",
            f"write vocab_size: {len(characters)} in the model",
        )
    return CharacterTokenizer(characters)


def _vocabulary(vocab_size: int, rule: str, fix: str) -> InputError:
    return InputError(
        Violation(
            field="model.vocab_size",
            value=str(vocab_size),
            rule=rule,
            nearest_fix=fix,
        )
    )


def load_tokenizer(path: Path) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json; the file is data and nothing in it is run.

    Raises:
        InputError: missing, too large, or no tokenizer that this program writes.
    """
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise InputError(
                Violation(file=str(path), rule="too large", limit=f"{MAX_TOKENIZER_BYTES} bytes")
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            Violation(file=str(path), rule=f"cannot read the tokenizer: {error.strerror}")
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(Violation(file=str(path), rule="not UTF-8 text")) from error
    return tokenizer_from_json(text, str(path))


def tokenizer_from_json(text: str, file: str) -> Tokenizer:
    """Returns the tokenizer whose `to_json` is `text`; `file` names it in errors."""
    problem = InputError(Violation(file=file, rule="not a tokenizer of this program"))
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise problem from error
    if not isinstance(data, dict):
        raise problem
    if "flopwright_tokenizer" in data:
        characters = data.get("characters")
        if not isinstance(characters, str) or len(set(characters)) != len(characters):
            raise problem
        return CharacterTokenizer(characters)
    try:
        engine = BpeEngine.from_str(text)
    except Exception as error:  # the library raises bare Exception for every parse error
        raise problem from error
    size = engine.get_vocab_size(with_added_tokens=True)
    expected = [engine.token_to_id(name) for name in special_names()]
    if size < NUM_BYTES + NUM_SPECIAL or expected != list(range(size - NUM_SPECIAL, size)):
        raise problem
    return BpeTokenizer(engine)
