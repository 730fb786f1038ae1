"""Checkpoints: what is saved comes back bit for bit, and nothing broken is loaded."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from flopwright.errors import InputError
from flopwright.executor.checkpoint import storage
from flopwright.executor.checkpoint.boxes import TensorSlice
from flopwright.executor.checkpoint.load import checkpoint_tokenizer, load_full, load_into
from flopwright.executor.checkpoint.manifest import find_checkpoint, read_manifest
from flopwright.executor.checkpoint.save import RunState, Saver, save
from flopwright.executor.data.tokenizer import CharacterTokenizer, tokenizer_hash
from flopwright.spec.load import load_model

MODEL = load_model("kimi_k2_mini")
TOKENIZER = CharacterTokenizer(" abc")


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(TOKENIZER.to_json())
    return lambda step=7: RunState(
        step=step, seed=3, model=MODEL, tokenizer_file=path, state={"samples": 64 * step}
    )


def tensors(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(5, 3, generator=g),
        "b.half": torch.randn(4, generator=g).bfloat16(),
        "rng": torch.randint(0, 255, (16,), generator=g, dtype=torch.uint8),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }


def rule_of(error):
    return str(error.value)


def test_round_trip_is_bit_identical(tmp_path, run):
    where = save(tmp_path / "ck", tensors(), run(), {"optimizer.step.a": 56})
    got, manifest = load_full(tmp_path / "ck", MODEL.content_hash(), tokenizer_hash(TOKENIZER))
    want = tensors()
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert torch.equal(got[name], want[name])
    assert manifest.scalars() == {"optimizer.step.a": 56}
    assert manifest.state == {"samples": 448}
    assert (manifest.step, manifest.seed, manifest.model) == (7, 3, MODEL)
    assert checkpoint_tokenizer(where, manifest).read_text() == TOKENIZER.to_json()
    assert sorted(p.name for p in where.iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
        "tokenizer.json",
    ]


def test_views_and_tied_tensors_are_saved_whole(tmp_path, run):
    base = torch.arange(12.0).reshape(3, 4)
    save(tmp_path / "ck", {"w": base, "tied": base, "t": base.t(), "row": base[1]}, run())
    got, _ = load_full(tmp_path / "ck")
    assert torch.equal(got["tied"], base)
    assert torch.equal(got["t"], base.t())
    assert torch.equal(got["row"], base[1])


def save_as_ranks(folder, per_rank, run):
    """Saves from as many threads as ranks, with a real barrier."""
    barrier = threading.Barrier(len(per_rank))
    threads = [
        threading.Thread(
            target=save,
            args=(folder, part, run, {f"of {rank}": rank}),
            kwargs={"rank": rank, "world_size": len(per_rank), "barrier": barrier.wait},
        )
        for rank, part in enumerate(per_rank)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)


def test_full_read_joins_stages_experts_and_flat_partitions(tmp_path, run):
    experts = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(1))
    flat = torch.arange(10.0)
    embed, head = torch.ones(4, 2), torch.zeros(4, 2)
    per_rank = [  # 2 stages x 2 expert ranks
        {"embed": embed, "x": TensorSlice(experts[:3], (6, 2, 3), (0, 0, 0))},
        {"x": [TensorSlice(experts[3:, :, :1], (6, 2, 3), (3, 0, 0)),
               TensorSlice(experts[3:, :, 1:], (6, 2, 3), (3, 0, 1))]},
        {"head": head, "flat": TensorSlice(flat[:7], (10,), (0,))},
        {"flat": TensorSlice(flat[7:], (10,), (7,)), "master.head": head.double()},
    ]  # fmt: skip
    save_as_ranks(tmp_path / "ck", per_rank, run())
    full, manifest = load_full(tmp_path / "ck")
    assert full.keys() == {"embed", "head", "x", "flat"}  # the weights alone
    assert torch.equal(full["x"], experts)
    assert torch.equal(full["flat"], flat)
    assert manifest.world_size == 4
    assert manifest.scalars() == {f"of {rank}": rank for rank in range(4)}


@pytest.mark.parametrize(
    ("second", "offset"), [((4, 10), 4), ((2, 10), 2), ((5, 8), 5)], ids=["gap", "lap", "short"]
)
def test_slices_that_do_not_fit_are_named(tmp_path, run, second, offset):
    flat = torch.arange(10.0)
    rest = flat[second[0] : second[1]]
    save_as_ranks(
        tmp_path / "ck",
        [
            {"f": TensorSlice(flat[:3], (10,), (0,))},
            {"f": TensorSlice(rest, (10,), (offset,))},
        ],
        run(),
    )
    with pytest.raises(InputError, match="f: its pieces hold"):
        load_full(tmp_path / "ck")


def test_wrong_model_and_tokenizer_are_both_reported(tmp_path, run):
    save(tmp_path / "ck", tensors(), run())
    with pytest.raises(InputError) as error:
        load_full(tmp_path / "ck", "0" * 16, "1" * 64)
    assert [v.field for v in error.value.violations] == ["model_hash", "tokenizer_hash"]
    with pytest.raises(InputError):
        load_full(tmp_path / "ck", "0" * 16)


def shard(tmp_path):
    return tmp_path / "ck" / "step-00000007" / "rank-00000.safetensors"


def test_flipped_byte_names_file_and_tensor(tmp_path, run):
    save(tmp_path / "ck", tensors(), run())
    data = bytearray(shard(tmp_path).read_bytes())
    header = int.from_bytes(data[:8], "little")
    spans = json.loads(data[8 : 8 + header])
    for name in tensors():
        broken = bytearray(data)
        broken[8 + header + spans[name]["data_offsets"][0]] ^= 1
        shard(tmp_path).write_bytes(broken)
        with pytest.raises(InputError) as error:
            load_full(tmp_path / "ck")
        assert error.value.violations[0].field == name
        assert error.value.violations[0].file == str(shard(tmp_path))


@pytest.mark.parametrize("damage", ["truncated", "missing", "header", "extended"])
def test_broken_shard_is_refused(tmp_path, run, damage):
    save(tmp_path / "ck", tensors(), run())
    path = shard(tmp_path)
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[:-1])
    elif damage == "extended":
        path.write_bytes(data + b"\0")
    else:
        path.write_bytes(b"\xff" * 8 + data[8:])
    with pytest.raises(InputError) as error:
        load_full(tmp_path / "ck")
    assert str(path) in rule_of(error)
    assert "a.weight" in rule_of(error)


def test_broken_manifest_is_refused(tmp_path, run):
    where = save(tmp_path / "ck", tensors(), run())
    path = where / "manifest.json"
    text = path.read_text()
    for broken in (
        text[: len(text) // 2],
        text.replace('"step": 7', '"step": 8'),
        text.replace("rank-00000.safetensors", "../../rank.safetensors"),
        "[]",
        "{}",
        "[" * 100_000,
    ):
        path.write_text(broken)
        with pytest.raises(InputError) as error:
            load_full(tmp_path / "ck")
        assert str(path) in rule_of(error)


def test_altered_tokenizer_is_refused(tmp_path, run):
    where = save(tmp_path / "ck", tensors(), run())
    (where / "tokenizer.json").write_text(CharacterTokenizer(" abd").to_json())
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        checkpoint_tokenizer(where, read_manifest(where))


def test_wrong_rank_step_and_folder(tmp_path, run):
    save(tmp_path / "ck", tensors(), run())
    for call in (
        lambda: load_full(tmp_path / "ck", step=8),
        lambda: load_full(tmp_path / "nothing"),
        lambda: load_full(tmp_path / "tokenizer.json"),
    ):
        with pytest.raises(InputError):
            call()


def test_a_run_folder_leads_to_its_only_checkpoint(tmp_path, run):
    save(tmp_path / "run" / "checkpoint-one", tensors(), run())
    assert find_checkpoint(tmp_path / "run").name == "step-00000007"
    save(tmp_path / "run" / "checkpoint-two", tensors(), run())
    with pytest.raises(InputError, match="checkpoint-one, checkpoint-two"):
        find_checkpoint(tmp_path / "run")


def test_old_steps_go_and_the_latest_is_loaded(tmp_path, run):
    for step in (1, 2, 30):
        save(tmp_path / "ck", {"w": torch.tensor([float(step)])}, run(step))
    assert sorted(p.name for p in (tmp_path / "ck").iterdir()) == [
        "step-00000002",
        "step-00000030",
    ]
    assert load_full(tmp_path / "ck")[0]["w"].item() == 30
    assert load_full(tmp_path / "ck", step=2)[0]["w"].item() == 2
    save(tmp_path / "ck", {"w": torch.tensor([31.0])}, run(30))
    assert load_full(tmp_path / "ck")[0]["w"].item() == 31
    assert not list((tmp_path / "ck").glob(".tmp*"))


def test_a_rank_whose_part_is_missing_stops_the_commit(tmp_path, run, monkeypatch):
    monkeypatch.setattr("flopwright.executor.checkpoint.save.COMMIT_TIMEOUT_S", 0.1)
    with pytest.raises(InputError, match="not visible to rank 0"):
        save(tmp_path / "ck", tensors(), run(), world_size=2)
    with pytest.raises(InputError, match="no checkpoint"):
        load_full(tmp_path / "ck")


KILL = """
    import os, pathlib, signal, sys
    import torch
    from pathlib import Path
    from flopwright.executor.checkpoint.save import RunState, save
    from flopwright.spec.load import load_model
    folder, tokenizer, at = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    run = RunState(step=8, seed=3, model=load_model("kimi_k2_mini"), tokenizer_file=tokenizer)
    if at == "rename":
        pathlib.Path.rename = die
    elif at == "manifest":
        import flopwright.executor.checkpoint.save as module
        module.manifest_text = die
    save(folder, {"w": torch.ones(3)}, run, barrier=die if at == "start" else lambda: None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("at", ["start", "manifest", "rename"])
def test_a_kill_leaves_the_earlier_checkpoint(tmp_path, run, at):
    save(tmp_path / "ck", {"w": torch.zeros(3)}, run(7))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(KILL),
            str(tmp_path / "ck"),
            str(tmp_path / "tokenizer.json"),
            at,
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert list(Path(tmp_path / "ck").glob(".tmp*"))  # it died in the middle
    got, manifest = load_full(tmp_path / "ck")
    assert manifest.step == 7
    assert torch.equal(got["w"], torch.zeros(3))
    save(tmp_path / "ck", {"w": torch.ones(3)}, run(8))
    assert load_full(tmp_path / "ck")[1].step == 8
    assert not list(Path(tmp_path / "ck").glob(".tmp*"))


def test_a_full_disk_is_told_and_nothing_is_damaged(tmp_path, run, monkeypatch):
    save(tmp_path / "ck", tensors(), run(7))

    def full(data, path):
        Path(path).write_bytes(b"half a fi")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("flopwright.executor.checkpoint.storage.save_file", full)
    with pytest.raises(InputError) as error:
        save(tmp_path / "ck", tensors(1), run(8))
    assert "rank 0 could not save step 8: No space left on device" in rule_of(error)
    assert "earlier checkpoints are as they were" in rule_of(error)
    assert not list((tmp_path / "ck").glob(".tmp*"))
    got, manifest = load_full(tmp_path / "ck")
    assert manifest.step == 7
    assert torch.equal(got["a.weight"], tensors()["a.weight"])


def test_a_folder_that_cannot_be_written_is_told(tmp_path, run):
    (tmp_path / "file").write_text("")  # root may write to every folder
    with pytest.raises(InputError, match="could not save step 7: Not a directory"):
        save(tmp_path / "file" / "ck", tensors(), run())


def test_a_save_that_failed_is_told_at_the_next_look(tmp_path, run, monkeypatch):
    def broken(data, path):
        raise SafetensorError("out of luck")

    monkeypatch.setattr("flopwright.executor.checkpoint.storage.save_file", broken)
    saver = Saver(tmp_path / "ck")
    saver.start(tensors(), run(), {})

    def look_until_told():
        for _ in range(1000):
            saver.check()
            time.sleep(0.01)

    with pytest.raises(InputError, match="out of luck"):
        look_until_told()
    saver.wait()  # told once


def test_what_is_saved_is_the_moment_of_the_call(tmp_path, run, monkeypatch):
    """The training changes its weights while they are written."""
    wait = threading.Event()
    write = storage.save_file

    def slow(data, path):
        assert wait.wait(30)
        write(data, path)

    monkeypatch.setattr("flopwright.executor.checkpoint.storage.save_file", slow)
    weights = {"w": torch.zeros(3), "row": TensorSlice(torch.zeros(1, 2), (1, 2), (0, 0))}
    saver = Saver(tmp_path / "ck")
    saver.start(weights, run(), {})
    weights["w"].add_(1)
    weights["row"].tensor.add_(1)
    wait.set()
    saver.wait()
    got, _ = load_full(tmp_path / "ck")
    assert not got["w"].any()
    assert not got["row"].any()


@pytest.mark.parametrize("world", [1, 3])
def test_boxes_of_another_cut_are_filled(tmp_path, run, world):
    """Written by rows, read by columns."""
    whole = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
    rows = [
        {"m": TensorSlice(part, (6, 6), (6 // world * i, 0))}
        for i, part in enumerate(whole.chunk(world))
    ]
    save_as_ranks(tmp_path / "ck", rows, run())
    where = find_checkpoint(tmp_path / "ck")
    left, right = torch.empty(6, 2), torch.empty(6, 4)
    boxes = [TensorSlice(left, (6, 6), (0, 0)), TensorSlice(right, (6, 6), (0, 2))]
    load_into(where, read_manifest(where), {"m": boxes})
    assert torch.equal(torch.cat([left, right], 1), whole)


@pytest.mark.parametrize(
    "wanted",
    [
        {"other": TensorSlice(torch.empty(5, 3), (5, 3), (0, 0))},
        {"a.weight": TensorSlice(torch.empty(4, 3), (4, 3), (0, 0))},
        {"a.weight": TensorSlice(torch.empty(5, 3, dtype=torch.bfloat16), (5, 3), (0, 0))},
    ],
    ids=["name", "shape", "format"],
)
def test_what_the_checkpoint_does_not_hold_is_named(tmp_path, run, wanted):
    where = save(tmp_path / "ck", tensors(), run())
    with pytest.raises(InputError, match="the checkpoint holds"):
        load_into(where, read_manifest(where), {name: [box] for name, box in wanted.items()})
