"""The endless tape of a streamed text's tokens: its pieces one behind the other, epoch by epoch.

Each epoch has the pieces in another order. A piece is tokenised when the tape comes to it, by
whichever of the run's readers it falls to, into a file that all of them map; files far behind
are removed. What the tape holds at a place depends on text, tokenizer and seed alone.

`positions.jsonl` keeps how many tokens came before each piece that was passed: a reader that
begins far from the start looks there, and where it says nothing counts them again.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flopwright.errors import InputError
from flopwright.executor.data.encode import Encoded, encode_documents
from flopwright.executor.data.pieces import Piece
from flopwright.executor.data.split import content_number
from flopwright.executor.data.tokenizer import Tokenizer

POSITIONS_FILE: Final = "positions.jsonl"
TOKENS_DIR: Final = "tokens"
# Pieces made ready before the tape comes to them, a reader; and those kept behind it.
AHEAD: Final = 2
BEHIND: Final = 64
_MAPPED: Final = 32
# How long a reader waits for another one's piece before it makes it itself, to the same bytes.
_WAIT_S: Final = 5.0
_POLL_S: Final = 0.005
# Beside seed and epoch, so that no other order is drawn from the same numbers.
_STREAM: Final = 0x746170


@lru_cache(maxsize=4)
def piece_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the pieces in the order of an epoch."""
    raw = np.random.PCG64(np.random.SeedSequence([seed, _STREAM, epoch])).random_raw(count)
    return np.argsort(raw, kind="stable").astype(np.int64)


@dataclass(slots=True, kw_only=True)
class Tape:
    """A reader of the tape.

    Attributes:
        folder: of the streamed text in the run's folder.
        held_out_below: documents whose number is below it are held out (`split.py`).
        share: (this reader's number, how many there are); the first one keeps positions.
    """

    folder: Path
    pieces: Sequence[Piece]
    tokenizer: Tokenizer
    vocab_size: int
    held_out_below: int
    seed: int
    share: tuple[int, int] = (0, 1)
    _first: int = -1
    _ends: list[int] = field(default_factory=lambda: [0])
    _mapped: OrderedDict[int, Encoded] = field(default_factory=OrderedDict)

    def read(self, first: int, length: int) -> Encoded:
        """Returns `length` tokens from token `first` of the tape on, and the starts among them."""
        number = self._piece_at(first)
        tokens: list[NDArray[Any]] = []
        starts: list[NDArray[np.int64]] = []
        missing, at = length, first - self._begin(number)
        while missing:
            piece = self._piece(number)
            part = piece.tokens[at : at + missing]
            tokens.append(part)
            begun = piece.starts[(piece.starts >= at) & (piece.starts < at + len(part))]
            starts.append(begun - at + (length - missing))
            missing, at, number = missing - len(part), 0, number + 1
            self._extend_to(number)
        self._look_ahead(number)
        return Encoded(np.concatenate(tokens), np.concatenate(starts))

    def _begin(self, number: int) -> int:
        """Returns the tokens before a piece of the tape that is known."""
        return self._ends[number - self._first]

    def _piece_at(self, token: int) -> int:
        """Returns the number on the tape of the piece that holds a token."""
        if self._first < 0 or token < self._ends[0]:
            self._first, before = self._known_before(token)
            self._ends = [before]
        while self._ends[-1] <= token:
            self._extend_to(self._first + len(self._ends))
        # of pieces without tokens, which begin where they end, the last one counts
        return self._first + bisect_right(self._ends, token) - 1

    def _extend_to(self, number: int) -> None:
        """Counts the pieces before piece `number` of the tape."""
        while self._first + len(self._ends) <= number:
            here = self._first + len(self._ends) - 1
            self._ends.append(self._ends[-1] + len(self._piece(here).tokens))
            self._refuse_nothing()
            if self.share[0] == 0 and here % AHEAD == 0:
                with (self.folder / POSITIONS_FILE).open("a", encoding="utf-8") as file:
                    file.write(json.dumps([here + 1, self._ends[-1]]) + "\n")

    def _refuse_nothing(self) -> None:
        epoch = len(self.pieces)
        if len(self._ends) > epoch and self._ends[-1] == self._ends[-1 - epoch]:
            raise InputError(
                f"the text in {self.pieces[0].files[0]}, ... has no document that is not held out"
            )

    def _known_before(self, token: int) -> tuple[int, int]:
        """Returns the last piece known to begin at or before a token, and where it begins."""
        found = (0, 0)
        path = self.folder / POSITIONS_FILE
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            try:
                number, before = json.loads(line)
            except ValueError:  # a kill may have cut a line
                continue
            if before <= token and number > found[0]:
                found = (number, before)
        return found

    def _piece(self, number: int) -> Encoded:
        """Returns a piece of the tape."""
        if number not in self._mapped:
            self._mapped[number] = self._load(number)
            while len(self._mapped) > _MAPPED:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(number)
        return self._mapped[number]

    def _load(self, number: int) -> Encoded:
        own, until = number % self.share[1] == self.share[0], time.monotonic() + _WAIT_S
        tokens, starts = self._files(number)
        while not tokens.is_file():
            if own or time.monotonic() > until:
                self._make(number)
                break
            time.sleep(_POLL_S)
        return Encoded(
            np.load(tokens, mmap_mode="r", allow_pickle=False),
            np.load(starts, mmap_mode="r", allow_pickle=False),
        )

    def _files(self, number: int) -> tuple[Path, Path]:
        name = f"{self._of_text(number):08d}"
        folder = self.folder / TOKENS_DIR
        return folder / f"{name}.tokens.npy", folder / f"{name}.starts.npy"

    def _of_text(self, number: int) -> int:
        """Returns which piece of the text a piece of the tape is."""
        epoch, place = divmod(number, len(self.pieces))
        return int(piece_order(len(self.pieces), self.seed, epoch)[place])

    def _make(self, number: int) -> None:
        """Tokenises a piece; its tokens get their name last."""
        found = self.pieces[self._of_text(number)].documents()
        kept = [text for text in found if content_number(text) >= self.held_out_below]
        encoded = encode_documents(kept, self.tokenizer, self.vocab_size)
        tokens, starts = self._files(number)
        tokens.parent.mkdir(exist_ok=True)
        for path, array in ((starts, encoded.starts), (tokens, encoded.tokens)):
            temporary = path.with_name(f".{path.name}.{self.share[0]}.npy")
            np.save(temporary, array, allow_pickle=False)
            temporary.replace(path)

    def _look_ahead(self, number: int) -> None:
        """Makes this reader's own next pieces ready, and removes its own that lie far behind."""
        index, count = self.share
        for ahead in range(number, number + AHEAD * count):
            if ahead % count == index and not self._files(ahead)[0].is_file():
                self._make(ahead)
        if len(self.pieces) <= 2 * (BEHIND + AHEAD * count):
            return
        for behind in range(max(0, number - BEHIND - count), number - BEHIND):
            if behind % count == index:
                for path in self._files(behind):
                    path.unlink(missing_ok=True)
