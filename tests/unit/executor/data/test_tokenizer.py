"""Byte-level BPE with K2's special block, and characters."""

import itertools
import json
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.executor.data.batches import check_tokenizer
from flopwright.executor.data.tokenizer import (
    NUM_SPECIAL,
    SPECIAL_OFFSETS,
    CharacterTokenizer,
    load_tokenizer,
    special_names,
    tokenizer_hash,
    train_bpe,
    train_characters,
)

DOCUMENTS = [
    "the quick brown fox jumps over the lazy dog and the cat. " * 20,
    "def fox(dog):\n    return dog + 1\n" * 30,
    "Der Fuchs läuft über die Straße. " * 20,
]
VOCAB = 600


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(DOCUMENTS, 256 + 30 + NUM_SPECIAL)


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_round_trips_and_holds_no_special_id(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert all(0 <= i < bpe.num_ranks for i in ids)
    assert bpe.encode_batch([text, "", text]) == [ids, [], ids]


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from([*special_names(), " ", "x", "\n"]), max_size=6))
def test_text_that_spells_special_tokens_stays_text(bpe, parts):
    text = "".join(parts)
    ids = bpe.encode(text)
    assert max(ids, default=0) < bpe.num_ranks
    assert bpe.decode(ids) == text


def test_specials_stand_after_the_ranks_at_k2s_offsets(bpe):
    data = json.loads(bpe.to_json())
    ids = {t["content"]: t["id"] for t in data["added_tokens"]}
    assert sorted(ids.values()) == list(range(bpe.num_ranks, bpe.num_ranks + 256))
    assert len(data["model"]["vocab"]) == bpe.num_ranks == 286
    # Kimi K2's published ids, less its 163,584 ranks
    k2 = {"[BOS]": 163584, "[EOS]": 163585, "<|im_end|>": 163586, "<|im_user|>": 163587}
    k2 |= {"<|im_assistant|>": 163588, "<|im_system|>": 163594, "<|im_middle|>": 163601}
    k2 |= {"[UNK]": 163838, "[PAD]": 163839}
    for name, k2_id in k2.items():
        assert ids[name] - bpe.num_ranks == k2_id - 163584
        assert bpe.special_id(name) == ids[name]
    assert bpe.eos_id == bpe.num_ranks + 1
    assert bpe.decode([bpe.eos_id, *bpe.encode("x"), bpe.special_id("[PAD]")]) == "x"
    assert len(set(special_names())) == 256
    assert len(SPECIAL_OFFSETS) == len(set(SPECIAL_OFFSETS.values()))


def test_ranks_are_those_of_a_plain_pair_merge_loop():
    """The learned merges against a direct pair-count loop over the pre-split words."""
    text = "low low low lower lower newest newest newest newest widest widest "
    bpe = train_bpe([text], 256 + 6 + NUM_SPECIAL)
    words = [list(w) for w in text.replace(" ", " Ġ").split(" ") if w]
    words = [[*w] for w in words if w != ["Ġ"]]
    expected = []
    for _ in range(6):
        counts = {}
        for w in words:
            for pair in itertools.pairwise(w):
                counts[pair] = counts.get(pair, 0) + 1
        top = max(counts.values())
        merges = json.loads(bpe.to_json())["model"]["merges"]
        merged = tuple(merges[len(expected)])
        assert counts[merged] == top  # ties may go either way
        expected.append(merged)
        for w in words:
            i = 0
            while i < len(w) - 1:
                if (w[i], w[i + 1]) == merged:
                    w[i : i + 2] = ["".join(merged)]
                i += 1


def test_training_is_deterministic_and_files_round_trip(tmp_path, bpe):
    again = train_bpe(DOCUMENTS, bpe.vocab_size)
    assert tokenizer_hash(again) == tokenizer_hash(bpe)
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe.to_json(), encoding="utf-8")
    loaded = load_tokenizer(path)
    assert tokenizer_hash(loaded) == tokenizer_hash(bpe)
    assert loaded.encode("a fox <|im_end|>") == bpe.encode("a fox <|im_end|>")
    assert loaded.vocab_size == bpe.vocab_size
    # the library reads the file by itself, specials included
    engine = tokenizers.Tokenizer.from_file(str(path))
    assert engine.token_to_id("[EOS]") == bpe.eos_id
    assert engine.encode("a fox").ids == bpe.encode("a fox")


def test_another_process_learns_the_same(bpe):
    code = (
        "from flopwright.executor.data.tokenizer import *\n"
        f"print(tokenizer_hash(train_bpe({DOCUMENTS!r}, {bpe.vocab_size})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == tokenizer_hash(bpe)


def test_a_small_text_or_vocabulary_is_refused():
    with pytest.raises(InputError, match="the text gives only") as error:
        train_bpe(["short"], 5000)
    assert "--tokenizer characters" in str(error.value)
    with pytest.raises(InputError, match="256 special ids"):
        train_bpe(DOCUMENTS, 511)


def test_another_tokenizer_is_refused(tmp_path, bpe):
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe.to_json())
    assert check_tokenizer(path, tokenizer_hash(bpe)).vocab_size == bpe.vocab_size
    path.write_text(train_bpe(DOCUMENTS, bpe.vocab_size - 1).to_json())
    with pytest.raises(InputError, match="another tokenizer"):
        check_tokenizer(path, tokenizer_hash(bpe))


def test_files_that_are_no_tokenizer_are_refused(tmp_path, bpe):
    swapped = json.loads(bpe.to_json())
    tokens = swapped["added_tokens"]
    tokens[0]["content"], tokens[1]["content"] = tokens[1]["content"], tokens[0]["content"]
    path = tmp_path / "tokenizer.json"
    cases = [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"flopwright_tokenizer": 1}',
        '{"flopwright_tokenizer": 1, "characters": "aa"}',
        json.dumps(swapped),
        bpe.to_json()[:-100],
    ]
    for text in cases:
        path.write_text(text)
        with pytest.raises(InputError, match="not a tokenizer"):
            load_tokenizer(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        load_tokenizer(path)
    with pytest.raises(InputError, match="cannot read"):
        load_tokenizer(tmp_path / "missing.json")


@settings(max_examples=100, deadline=None)
@given(text=st.text(min_size=1))
def test_characters_round_trip(text):
    tokenizer = train_characters([text], 2**21)
    assert tokenizer.vocab_size == len(set(text))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert set(ids) == set(range(tokenizer.vocab_size))


def test_characters_need_room_and_refuse_unknown_ones(tmp_path):
    with pytest.raises(InputError, match="write vocab_size: 3"):
        train_characters(["abca"], 2)
    tokenizer = CharacterTokenizer("abc")
    with pytest.raises(InputError, match="'z'"):
        tokenizer.encode("az")
    path = tmp_path / "t.json"
    path.write_text(tokenizer.to_json())
    assert load_tokenizer(path).encode("cab") == [2, 0, 1]
    assert load_tokenizer(path).eos_id is None
