"""Sample order does not depend on the plan, and every token of an epoch is read once."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.executor.data.batches import DataMeta, Dataset, open_dataset
from flopwright.executor.data.prepare import prepare
from flopwright.spec.load import load_model
from flopwright.spec.workload import LearningRate, Workload

META = DataMeta(
    source="",
    text_hash="",
    text_size=1,
    documents=1,
    duplicates=0,
    skipped_files=0,
    truncated=False,
    split_rule="document",
    tokenizer_kind="bpe",
    tokenizer_hash="",
    vocab_size=2**20,
    train_tokens=1,
    held_out_tokens=1,
)


def dataset(train, seq_len, batch, seed=0, held_out=None):
    train = np.asarray(train, dtype=np.uint32)
    return Dataset(
        folder=Path(),
        meta=META,
        train=train,
        held_out=train if held_out is None else np.asarray(held_out, dtype=np.uint32),
        seq_len=seq_len,
        global_batch_size=batch,
        seed=seed,
    )


@settings(max_examples=200, deadline=None)
@given(
    dp=st.integers(1, 6),
    micro_batch_size=st.integers(1, 4),
    num_microbatches=st.integers(1, 4),
    num_tokens=st.integers(1, 300),
    seq_len=st.integers(1, 20),
    step=st.integers(0, 50),
    seed=st.integers(0, 2**31),
)
def test_ranks_and_microbatches_make_up_the_global_batch(
    dp, micro_batch_size, num_microbatches, num_tokens, seq_len, step, seed
):
    batch = dp * micro_batch_size * num_microbatches
    data = dataset(np.arange(num_tokens), seq_len, batch, seed)
    parts = [data.rank_slice(step, r, dp, micro_batch_size) for r in range(dp)]
    assert all(p.shape == (num_microbatches, micro_batch_size, seq_len + 1) for p in parts)
    # micro-batch m of rank r is the (m * dp + r)-th of the batch
    joined = np.concatenate([parts[r][m] for m in range(num_microbatches) for r in range(dp)])
    assert joined.dtype == np.int64
    np.testing.assert_array_equal(joined, data.batch(step))
    one = dataset(np.arange(num_tokens), seq_len, 1, seed)
    for i in range(batch):  # nor does a sample depend on the batch size
        np.testing.assert_array_equal(one.batch(step * batch + i)[0], joined[i])


@settings(max_examples=100, deadline=None)
@given(
    num_tokens=st.integers(1, 200),
    seq_len=st.integers(1, 40),
    epoch=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_an_epoch_reads_disjoint_stretches_of_the_ring(num_tokens, seq_len, epoch, seed):
    samples = max(1, num_tokens // seq_len)
    data = dataset(np.arange(num_tokens), seq_len, samples, seed)
    rows = data.batch(epoch)
    assert data.samples_per_epoch == samples
    # neighbours in a sequence are neighbours in the text, the end joined to the start
    assert (np.diff(rows, axis=1) % num_tokens == 1 % num_tokens).all()
    if num_tokens >= seq_len:
        read = rows[:, :-1].ravel()
        assert len(set(read.tolist())) == len(read) == samples * seq_len
        assert num_tokens - len(read) < seq_len


def test_order_is_fixed_and_differs_by_seed_and_epoch():
    data = dataset(np.arange(1000), 10, 4, seed=1)
    np.testing.assert_array_equal(data.batch(3), dataset(np.arange(1000), 10, 4, seed=1).batch(3))
    assert (data.batch(0) != dataset(np.arange(1000), 10, 4, seed=2).batch(0)).any()
    assert (data.batch(0) != data.batch(25)).any()  # 25 steps of 4 are an epoch of 100
    assert data.batch(0)[:, 0].tolist() == [47, 727, 867, 207]  # pinned: resumed runs need it


def test_held_out_sequences_cover_the_text_and_are_thinned_evenly():
    data = dataset(np.arange(9), 4, 1, held_out=np.arange(23))
    rows = data.held_out_sequences()
    assert rows.shape == (5, 5)
    assert rows[:, 1:].ravel().tolist() == list(range(1, 21))
    assert data.held_out_sequences(2)[:, 0].tolist() == [0, 8]
    assert [b.shape for b in data.held_out_batches(2)] == [(2, 5), (2, 5), (1, 5)]
    short = dataset(np.arange(9), 4, 1, held_out=[5, 6, 7])
    assert short.held_out_sequences().tolist() == [[5, 6, 7, 5, 6]]


WORKLOAD = Workload(
    seq_len=16,
    global_batch_size=4,
    total_tokens=6400,
    learning_rate=LearningRate(warmup_steps=10),
)


@pytest.fixture
def model():
    return load_model("kimi_k2_mini").model_copy(update={"vocab_size": 600})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWRIGHT_HOME", str(tmp_path / "home"))
    text = tmp_path / "text"
    text.mkdir()
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, 5))) for _ in range(300)]
    for i in range(60):
        (text / f"{i:02d}.txt").write_text(" ".join(rng.choice(words, 2500)))
    return text


def test_prepare_writes_what_ranks_open(tmp_path, folder, model):
    seen = []
    data = prepare(
        folder, model, WORKLOAD, tmp_path / "out", progress=lambda p, s: seen.append((p, s))
    )
    assert [p for p, s in seen if s == 1.0] == ["read", "tokenizer", "tokens", "tokens"]
    assert data.meta.split_rule == "document"
    assert data.held_out.dtype == np.uint16
    assert isinstance(data.train, np.memmap)
    again = open_dataset(tmp_path / "out", WORKLOAD, 600)
    np.testing.assert_array_equal(data.batch(5), again.batch(5))
    tokenizer = data.tokenizer()
    texts = sorted(p.read_text() for p in folder.iterdir())
    stream = np.concatenate([data.train, data.held_out]).tolist()
    back, current = [], []
    for token in stream:
        if token == tokenizer.eos_id:
            back.append(tokenizer.decode(current))
            current = []
        else:
            current.append(token)
    assert sorted(back) == texts  # every document once, on one side or the other
    assert current == []
    held = (data.held_out == tokenizer.eos_id).sum()
    assert 1 <= held <= 6


def test_the_cache_gives_the_same_files_and_is_not_needed_later(tmp_path, folder, model):
    first = prepare(folder, model, WORKLOAD, tmp_path / "a")
    names = []
    second = prepare(
        folder, model, WORKLOAD, tmp_path / "b", progress=lambda p, s: names.append(p)
    )
    assert "tokenizer" not in names
    for file in (tmp_path / "home" / "data").rglob("*"):
        if file.is_file():
            file.unlink()
    np.testing.assert_array_equal(first.train, second.train)
    assert open_dataset(tmp_path / "b", WORKLOAD).meta == first.meta


@pytest.mark.slow
def test_other_text_or_vocabulary_is_another_entry(tmp_path, folder, model):
    first = prepare(folder, model, WORKLOAD, tmp_path / "a")
    (folder / "00.txt").write_text("changed " * 100)
    second = prepare(folder, model, WORKLOAD, tmp_path / "b")
    assert first.meta.text_hash != second.meta.text_hash
    third = prepare(folder, model.model_copy(update={"vocab_size": 601}), WORKLOAD, tmp_path / "c")
    assert third.meta.vocab_size == 601
    assert third.meta.tokenizer_hash != second.meta.tokenizer_hash


@pytest.mark.slow
def test_a_broken_cache_entry_is_made_again(tmp_path, folder, model):
    first = prepare(folder, model, WORKLOAD, tmp_path / "a")
    (cached,) = (tmp_path / "home" / "data").iterdir()
    (cached / "tokenizer.json").unlink()
    second = prepare(folder, model, WORKLOAD, tmp_path / "b")
    assert second.meta == first.meta


@pytest.mark.slow
def test_wrong_files_are_refused(tmp_path, folder, model):
    prepare(folder, model, WORKLOAD, tmp_path / "a")
    with pytest.raises(InputError, match="another vocabulary"):
        open_dataset(tmp_path / "a", WORKLOAD, 700)
    for name, content, message in (
        ("tokenizer.json", None, "another tokenizer"),
        ("train_tokens.npy", b"\x93NUMPY", "not a readable token file"),
        ("meta.json", b"{}", "not the record"),
    ):
        broken = tmp_path / f"broken-{name}"
        prepare(folder, model, WORKLOAD, broken)
        if content is None:
            other = prepare(
                folder, model.model_copy(update={"vocab_size": 650}), WORKLOAD, tmp_path / "o"
            )
            content = (other.folder / name).read_bytes()
        (broken / name).unlink()
        (broken / name).write_bytes(content)
        with pytest.raises(InputError, match=message):
            open_dataset(broken, WORKLOAD)
    with pytest.raises(InputError, match="cannot read prepared data"):
        open_dataset(tmp_path / "nothing", WORKLOAD)


def test_pickled_arrays_are_refused(tmp_path, folder, model):
    prepare(folder, model, WORKLOAD, tmp_path / "a")
    path = tmp_path / "a" / "train_tokens.npy"
    path.unlink()
    np.save(path, np.array([{}, 1], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="not a readable token file"):
        open_dataset(tmp_path / "a", WORKLOAD)


def test_one_sentence_is_repeated_and_measured_on_itself(tmp_path, monkeypatch, model):
    monkeypatch.setenv("FLOPWRIGHT_HOME", str(tmp_path / "home"))
    sentence = "a bee sees.\n"
    (tmp_path / "s.txt").write_text(sentence)
    data = prepare(
        tmp_path / "s.txt",
        model.model_copy(update={"vocab_size": len(set(sentence))}),
        WORKLOAD.model_copy(update={"seq_len": 40}),
        tmp_path / "out",
        "characters",
    )
    assert data.meta.split_rule == "train"
    decode = data.tokenizer().decode
    endless = sentence * 5
    for row in np.concatenate([data.batch(s) for s in range(20)]):
        assert decode(row.tolist()) in endless
    starts = {decode(r.tolist())[:12] for s in range(50) for r in data.batch(s)}
    assert len(starts) == len(sentence)  # every phase comes
    assert decode(data.held_out_sequences()[0].tolist()) == endless[:41]


@pytest.mark.parametrize(("text", "words"), [("", "is empty"), ("a", "too short")])
def test_a_text_that_nothing_can_be_learnt_from_is_refused(tmp_path, monkeypatch, text, words):
    monkeypatch.setenv("FLOPWRIGHT_HOME", str(tmp_path / "home"))
    (tmp_path / "t.txt").write_text(text)
    model = load_model("first_steps")
    with pytest.raises(InputError, match=words):
        prepare(tmp_path / "t.txt", model, WORKLOAD, tmp_path / "out", "characters")
    assert [p.name for p in tmp_path.iterdir()] == ["t.txt"]
    (tmp_path / "t.txt").write_text("ab")
    data = prepare(tmp_path / "t.txt", model, WORKLOAD, tmp_path / "out", "characters")
    assert data.entropies().bigram > 0
