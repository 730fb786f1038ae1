"""Text sources: order, what is skipped, and broken records by file and line."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flopwright.executor.data.text as module
from flopwright.errors import InputError
from flopwright.executor.data.split import split_documents
from flopwright.executor.data.text import load_standard_library, load_text


def test_a_folder_is_read_by_path_and_its_binaries_are_counted(tmp_path):
    root = tmp_path / "root"
    (root / "b").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "b" / "one.md").write_text("one")
    (root / "a.txt").write_text("ä two", encoding="utf-8")
    (root / "c.py").write_text("three = 3")
    (root / "blank.txt").write_text(" \n")
    (root / "latin.txt").write_bytes(b"\xe4\xf6\xfc")
    (root / "zeros.txt").write_bytes(b"a\0b")
    (root / "picture.png").write_bytes(b"\x89PNG")
    (root / ".git" / "hidden.txt").write_text("hidden")
    (tmp_path / "secret.txt").write_text("outside")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    (root / "dangling.txt").symlink_to(tmp_path / "nowhere.txt")
    (root / "within.txt").symlink_to(root / "c.py")
    os.mkfifo(root / "pipe.txt")
    corpus = load_text(root)
    assert corpus.documents == ("ä two", "one", "three = 3", "three = 3")
    assert corpus.skipped == 5  # latin, zeros, link, dangling, pipe
    assert not corpus.truncated
    assert corpus.text_bytes == len("ä two".encode()) + 3 + 9 + 9


def test_one_file_is_one_document(tmp_path):
    (tmp_path / "x.anything").write_text("hello")
    assert load_text(tmp_path / "x.anything").documents == ("hello",)


@pytest.mark.parametrize(("name", "text"), [("e.txt", ""), ("b.txt", " \n"), ("e.jsonl", "\n")])
def test_a_file_without_text_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match="the text is empty"):
        load_text(tmp_path / name)


def test_reading_stops_at_the_limit_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_TEXT_BYTES", 10)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 4)
    corpus = load_text(tmp_path)
    assert corpus.documents == ("aaaa", "bbbb")
    assert corpus.truncated
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 3)
    with pytest.raises(InputError, match="3 files skipped"):
        load_text(tmp_path)


def test_jsonl_and_parquet_give_the_same_documents(tmp_path):
    texts = ["first\nline", "zweiter Text ü", "🙂"]
    lines = "\n\n".join(json.dumps({"id": i, "text": t}) for i, t in enumerate(texts))
    (tmp_path / "d.jsonl").write_text(lines + "\n")
    table = pa.table({"id": [0, 1, 2], "text": texts})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=2)
    assert load_text(tmp_path / "d.jsonl").documents == tuple(texts)
    assert load_text(tmp_path / "d.parquet").documents == tuple(texts)
    assert load_text(tmp_path).documents == tuple(texts * 2)  # a folder of records only
    (tmp_path / "note.md").write_text("text wins")
    assert load_text(tmp_path).documents == ("text wins",)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object with a string field"),
        ('{"text": 3}', "not an object with a string field"),
        ('{"body": "x"}', "its fields: body"),
        ('{"text": "\\ud800"}', "surrogate"),
        ("[" * 100_000, "not JSON"),
        ("\xff", "not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, rule):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "ok"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(InputError, match=rule) as error:
        load_text(path)
    violation = error.value.violations[0]
    assert (violation.file, violation.line) == (str(path), 3)


def test_broken_parquet_names_file_and_row_group(tmp_path):
    path = tmp_path / "d.parquet"
    path.write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        load_text(path)
    pq.write_table(pa.table({"body": ["x"]}), path)
    with pytest.raises(InputError, match="its columns: body"):
        load_text(path)
    pq.write_table(pa.table({"text": [1, 2]}), path)
    with pytest.raises(InputError, match="no string column"):
        load_text(path)
    pq.write_table(pa.table({"text": ["a", "b", None]}), path, row_group_size=2)
    with pytest.raises(InputError, match="row 0 of row group 1 has no text"):
        load_text(path)
    pq.write_table(pa.table({"text": ["a" * 999, "b" * 999]}), path, row_group_size=1)
    good = path.read_bytes()
    group = pq.ParquetFile(path).metadata.row_group(1).column(0)
    start = group.dictionary_page_offset or group.data_page_offset
    path.write_bytes(good[:start] + b"\xff" * 20 + good[start + 20 :])
    with pytest.raises(InputError, match="row group 1 cannot be read"):
        load_text(path)


def test_nothing_there_or_nothing_in_it(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        load_text(tmp_path / "missing")
    with pytest.raises(InputError, match="no text in it"):
        load_text(tmp_path)
    (tmp_path / "x").write_bytes(b"\0\1")
    with pytest.raises(InputError, match="not a readable UTF-8 text file"):
        load_text(tmp_path / "x")


@pytest.mark.slow
def test_the_standard_library_is_enough_or_says_what_to_pass():
    corpus = load_text(None)
    assert corpus.text_bytes > 5_000_000
    assert any('"""JSON (JavaScript Object Notation)' in d for d in corpus.documents)
    assert corpus == load_text(None)
    with pytest.raises(InputError, match="--text") as error:
        load_standard_library(minimum_bytes=10**12)
    assert error.value.violations[0].limit == "at least 1000000000000 bytes"


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=60), seed=st.integers(0, 99))
def test_split_keeps_every_document_on_one_side(sizes, seed):
    documents = [f"{seed}-{i}:" + "x" * n for i, n in enumerate(sizes)]
    split = split_documents([*documents, documents[0]])
    assert split.duplicates == 1
    total = sum(map(len, documents))
    held = sum(map(len, split.held_out))
    if split.rule == "document":
        assert sorted((*split.train, *split.held_out)) == sorted(documents)
        assert 16_384 <= held <= 0.1 * total
        assert held >= 0.02 * total
        backwards = split_documents(documents[::-1])
        assert sorted(backwards.held_out) == sorted(split.held_out)
    elif split.rule == "tail":
        assert len("".join(split.train)) + held == total
        assert len(split.held_out) == 1
        assert any(d.endswith(split.held_out[0]) for d in documents)
        assert 16_000 <= held <= 0.1 * total
    else:
        assert split.train == split.held_out == tuple(documents)
        assert total < 60 * 20 * 16_384


def test_of_one_long_document_the_end_is_held_out():
    text = "".join(chr(97 + i % 26) for i in range(1_000_000))
    split = split_documents([text, "short"])
    assert split.rule == "tail"
    (tail,) = split.held_out
    assert len(tail) == pytest.approx(20_000, abs=10)
    assert split.train == (text[: -len(tail)], "short")
