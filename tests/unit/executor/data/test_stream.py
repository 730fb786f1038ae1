"""Streamed text: every format by pieces, the same order whoever reads and wherever they begin."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flopwright.executor.data.pieces as pieces_module
import flopwright.executor.data.stream as stream_module
import flopwright.executor.data.tape as tape_module
from flopwright.errors import InputError
from flopwright.executor.data.opening import open_data, prepare_data
from flopwright.executor.data.pieces import find_pieces, read_pieces, write_pieces
from flopwright.executor.data.prepare_stream import held_out_bound
from flopwright.executor.data.split import content_number
from flopwright.executor.data.stream import StreamedDataset
from flopwright.executor.data.text import load_text
from flopwright.spec.load import load_scenario
from flopwright.spec.packing import Packing

SCENARIO = load_scenario("kimi_k2_mini_2cpu_fp32")
WORKLOAD = SCENARIO.workload.model_copy(update={"seq_len": 16, "global_batch_size": 12})
TEXTS = [f"document {i}: " + "abcdefghij"[i % 10] * (5 + 7 * i % 90) for i in range(120)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 400)
    monkeypatch.setattr(stream_module, "SHUFFLED_TOKENS", 512)
    monkeypatch.setattr(tape_module, "_WAIT_S", 0.0)  # readers take turns here, in one thread


def written(kind: str, folder: Path) -> Path:
    """Writes TEXTS in a format and returns what is passed as --text."""
    folder.mkdir(parents=True)
    if kind == "files":
        for i, text in enumerate(TEXTS):
            (folder / f"{i:03d}.txt").write_text(text)
        return folder
    if kind == "jsonl":
        lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)]
        (folder / "d.jsonl").write_text("\n".join(lines) + "\n")
        return folder / "d.jsonl"
    table = pa.table({"text": TEXTS})
    if kind == "parquet":
        pq.write_table(table, folder / "d.parquet", row_group_size=9)
        return folder / "d.parquet"
    return saved_dataset(folder, table, kind)


def saved_dataset(folder: Path, table: pa.Table, kind: str) -> Path:
    """Writes what Dataset.save_to_disk writes: Arrow streams and a record of them."""
    where = folder / "train" if kind == "splits" else folder
    where.mkdir(exist_ok=True)
    names = []
    for number, part in enumerate((table.slice(0, 70), table.slice(70))):
        names.append(f"data-{number:05d}-of-00002.arrow")
        with (
            pa.OSFile(str(where / names[-1]), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(part, max_chunksize=11)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (where / "state.json").write_text(json.dumps(state))
    (where / "dataset_info.json").write_text("{}")
    if kind == "splits":
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    (folder / "README.md").write_text("about the data")
    return folder


FORMATS = ("files", "jsonl", "parquet", "saved", "splits")


@pytest.mark.parametrize("kind", FORMATS)
def test_pieces_together_are_the_text_that_is_read_whole(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path / "t")
    pieces, _ = find_pieces(path)
    assert len(pieces) > 5
    write_pieces(tmp_path / "pieces.json", pieces)
    assert read_pieces(tmp_path / "pieces.json") == pieces
    found = [text for piece in pieces for text in piece.documents()]
    assert found == TEXTS == list(load_text(path).documents)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 90))
def test_every_line_is_in_one_run_of_bytes(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], size: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "d.jsonl"
    texts = [f"{i}" + "ü" * n for i, n in enumerate(lengths)]
    path.write_text(
        "\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts), encoding="utf-8"
    )
    before, pieces_module.PIECE_BYTES = pieces_module.PIECE_BYTES, size
    try:
        pieces, _ = find_pieces(path)
    finally:
        pieces_module.PIECE_BYTES = before
    assert [t for piece in pieces for t in piece.documents()] == texts


def prepared(path: Path, folder: Path, **update: Any) -> tuple[Path, Any]:
    workload = WORKLOAD.model_copy(update=update)
    prepare_data(path, SCENARIO.model, workload, folder, "characters", stream=True)
    return folder, workload


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("jsonl", tmp_path_factory.mktemp("stream") / "t")


def opened(path: Path, folder: Path, workload: Any, share: tuple[int, int] = (0, 1)) -> Any:
    found = open_data(path, folder, workload, stream=True, share=share)
    assert isinstance(found, StreamedDataset)
    return found


def test_a_tape_has_every_document_that_is_not_held_out_once_an_epoch(
    jsonl: Path, tmp_path: Path
) -> None:
    folder, workload = prepared(jsonl, tmp_path / "data")
    data = opened(jsonl, folder, workload)
    kept = [t for t in TEXTS if content_number(t) >= data.meta.held_out_below]
    assert 100 < len(kept) < len(TEXTS)
    length = sum(map(len, kept))  # a character is a token, and no token ends a document
    decode = data.tape.tokenizer.decode
    for epoch in range(2):
        got = data.tape.read(epoch * length, length)
        ends = [*got.starts.tolist()[1:], length]
        documents = [
            decode(got.tokens[a:b].tolist()) for a, b in zip(got.starts, ends, strict=True)
        ]
        assert sorted(documents) == sorted(kept)
        assert documents != kept
    held = decode(data.held_out.tolist())
    assert sorted(held.split("document ")[1:]) == sorted(
        t.removeprefix("document ") for t in TEXTS if t not in kept
    )


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    plan=st.sampled_from([(1, 1), (1, 12), (2, 3), (2, 6), (3, 4), (4, 1), (6, 2)]),
    world=st.integers(1, 4),
    begin=st.integers(0, 30),
    packed=st.booleans(),
)
def test_order_is_the_same_under_every_plan_world_and_from_any_step(
    jsonl: Path, tmp_path_factory: pytest.TempPathFactory, plan: tuple[int, int], world: int,
    begin: int, packed: bool,
) -> None:  # fmt: skip
    """Ranks of pp, tp, ep and cp read as those of their data-parallel index do."""
    dp, micro = plan
    update = {"packing": Packing() if packed else None}
    one, workload = prepared(jsonl, tmp_path_factory.mktemp("one"), **update)
    whole = opened(jsonl, one, workload)
    many, _ = prepared(jsonl, tmp_path_factory.mktemp("many"), **update)
    ranks = [opened(jsonl, many, workload, (i, world)) for i in range(world)]
    for step in (begin, begin + 1):
        wanted = whole.rank_batch(step, 0, 1, 12)
        parts = [ranks[r % world].rank_batch(step, r, dp, micro) for r in range(dp)]
        for name in ("tokens", "starts", "weights"):
            mine = [getattr(part, name) for part in parts]
            theirs = getattr(wanted, name)
            if theirs is None:
                assert mine == [None] * dp
                continue
            joined = np.stack(mine, 1).reshape(theirs.shape)
            assert np.array_equal(joined, theirs)
        assert {part.total_weight for part in parts} == {wanted.total_weight}


def test_a_reader_that_begins_later_counts_on_or_looks_it_up(jsonl: Path, tmp_path: Path) -> None:
    folder, workload = prepared(jsonl, tmp_path / "data")
    first = opened(jsonl, folder, workload)
    wanted = [first.batch(step) for step in range(60)]
    positions = folder / tape_module.POSITIONS_FILE
    assert len(positions.read_text().splitlines()) > 3
    with positions.open("a") as file:
        file.write("[7")  # what a kill leaves of a line
    assert np.array_equal(opened(jsonl, folder, workload).batch(55), wanted[55])
    again = opened(jsonl, folder, workload)
    assert np.array_equal(again.batch(59), wanted[59])
    assert np.array_equal(again.batch(3), wanted[3])  # back over what it began behind
    positions.unlink()
    assert np.array_equal(opened(jsonl, folder, workload).batch(55), wanted[55])


def test_tokens_far_behind_are_removed_and_made_again(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape_module, "BEHIND", 3)
    monkeypatch.setattr(tape_module, "_MAPPED", 2)
    folder, workload = prepared(jsonl, tmp_path / "data", seq_len=4)
    data = opened(jsonl, folder, workload)
    early = data.batch(0)
    data.tape.read(3000, 10)
    for place in range(0, 3000, 50):
        data.tape.read(place, 10)
    assert len(list((folder / tape_module.TOKENS_DIR).glob("*.tokens.npy"))) < data.meta.pieces
    assert np.array_equal(data.batch(0), early)


def test_documents_are_held_out_by_content_and_never_all() -> None:
    assert held_out_bound(["one"]) is None
    assert held_out_bound([]) is None
    bound = held_out_bound(["one", "two"])
    assert bound is not None
    assert sum(content_number(t) < bound for t in ("one", "two")) == 1
    many = [f"{i} " + "x" * 1000 for i in range(3000)]
    bound = held_out_bound(many)
    assert bound is not None
    share = sum(content_number(t) < bound for t in many) / len(many)
    assert 0.02 <= share < 0.022


def test_what_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a single document")
    with pytest.raises(InputError, match="too few were found"):
        prepared(tmp_path / "one.txt", tmp_path / "data")
    folder = tmp_path / "odd"
    saved_dataset_of(folder, ["left", "right"])
    with pytest.raises(InputError, match="no split 'train'"):
        find_pieces(folder)
    (folder / "left").mkdir()
    (folder / "left" / "state.json").write_text('{"_data_files": [{"filename": "../../x"}]}')
    with pytest.raises(InputError, match="not in the folder"):
        find_pieces(folder / "left")
    (folder / "left" / "state.json").write_text('{"_data_files": [{"filename": "x.arrow"}]}')
    (folder / "left" / "x.arrow").write_bytes(b"no arrow")
    with pytest.raises(InputError, match="not a readable Arrow file"):
        find_pieces(folder / "left")
    (tmp_path / "d.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    pieces, _ = find_pieces(tmp_path / "d.jsonl")
    with pytest.raises(InputError, match="line at byte 17"):
        [t for piece in pieces for t in piece.documents()]


def saved_dataset_of(folder: Path, splits: list[str]) -> None:
    folder.mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": splits}))


def test_a_text_that_has_changed_is_refused_where_it_is_read_on(tmp_path: Path) -> None:
    path = written("files", tmp_path / "t")
    folder, workload = prepared(path, tmp_path / "data")
    opened(path, folder, workload).tape.read(0, 9000)
    for file in (folder / tape_module.TOKENS_DIR).iterdir():
        file.unlink()
    (path / "007.txt").write_text("other words")
    with pytest.raises(InputError, match=r"007.txt: the file has changed since the run began"):
        opened(path, folder, workload).tape.read(0, 9000)


def test_a_named_pipe_in_a_folder_is_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("a text of some words " * 20)
    os.mkfifo(folder / "p.txt")
    pieces, _ = find_pieces(folder)
    assert [t for p in pieces for t in p.documents()] == ["a text of some words " * 20]
