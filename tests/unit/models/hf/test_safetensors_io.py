"""Checkpoints in released layouts: names, streams, and every way a file can be wrong."""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flopwright.errors import InputError
from flopwright.models.hf import read, write
from flopwright.models.hf.names import stored_tensors
from flopwright.models.hf.safetensors_io import (
    TensorRows,
    load_stage_,
    open_checkpoint,
    read_tensors,
    save_stage,
    stage_tensors,
    write_checkpoint,
)
from flopwright.models.transformer.module import Stage, build_stage, init_weights_
from flopwright.spec.load import load_model
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import parameters

FAMILIES = {
    "deepseek_v3": "deepseek_v3",
    "llama": "llama31_8b",
    "qwen2": "qwen25_32b",
    "qwen3": "qwen3_8b",
    "qwen3_moe": "qwen3_30b_a3b",
    "mixtral": "mixtral_8x7b",
    "gpt2": "gpt_h12288_l96",
    "gpt_oss": "gpt_oss_20b",
    "glm4_moe": "glm45_air",
    "minimax_m2": "minimax_m2",
    "kimi_linear": "kimi_linear_mini",
    "kimi_k3": "kimi_k3_mini",
}
INDEX = "model.safetensors.index.json"


def small(family: str) -> ModelSpec:
    return load_model(FAMILIES[family]).shrunk(
        hidden_size=32, num_layers=4, vocab_size=40, max_seq_len=64
    )


def whole_stage(spec: ModelSpec, **kwargs: Any) -> Stage:
    stage = build_stage(spec, range(-1, spec.num_layers + 1), **kwargs)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in (*stage.parameters(), *stage.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return stage


def tensors(stage: Stage) -> dict[str, Tensor]:
    return dict((*stage.named_parameters(), *stage.named_buffers()))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Stage, Path]:
    """A small DeepSeek-V3 in several shards."""
    stage = whole_stage(small("deepseek_v3"))
    save_stage(stage, tmp_path / "model", max_shard_bytes=100_000)
    return stage, tmp_path / "model"


def edit(folder: Path, name: str, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Changes the tensors of the file that holds `name`, the index following; returns it."""
    index = json.loads((folder / INDEX).read_text())
    path = folder / index["weight_map"][name]
    held = load_file(path)
    change(held)
    save_file(held, path)
    kept = {k: v for k, v in index["weight_map"].items() if v != path.name}
    index["weight_map"] = {**kept, **dict.fromkeys(held, path.name)}
    (folder / INDEX).write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_out_and_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    stage = whole_stage(small(family))
    save_stage(stage, tmp_path / "model", max_shard_bytes=50_000)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    again = build_stage(stage.spec, stage.layer_numbers)
    load_stage_(again, tmp_path / "model")
    for name, tensor in tensors(again).items():
        assert torch.equal(tensor, tensors(stage)[name]), name


def test_released_names_and_values(tmp_path: Path) -> None:
    stage = whole_stage(small("deepseek_v3"))
    save_stage(stage, tmp_path / "model")
    (path,) = (tmp_path / "model").glob("*.safetensors")
    stored, ours = load_file(path), tensors(stage)
    layer = "model.layers.3.mlp"
    gate_up = ours[f"{layer}.experts.gate_up_proj"]
    width = gate_up.shape[1] // 2
    for e in (0, 5):
        assert torch.equal(stored[f"{layer}.experts.{e}.gate_proj.weight"], gate_up[e, :width])
        assert torch.equal(stored[f"{layer}.experts.{e}.up_proj.weight"], gate_up[e, width:])
        down = ours[f"{layer}.experts.down_proj"][e]
        assert torch.equal(stored[f"{layer}.experts.{e}.down_proj.weight"], down)
    assert f"{layer}.gate.e_score_correction_bias" in stored
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in stored
    assert "model.layers.0.mlp.gate_proj.weight" in stored


def test_mixtral_and_gpt2_names() -> None:
    mixtral = {s.name: s for s in stored_tensors(small("mixtral"))}
    assert "model.layers.1.block_sparse_moe.gate.weight" in mixtral
    w1, w3 = (
        mixtral[f"model.layers.1.block_sparse_moe.experts.2.{w}.weight"].parts[0]
        for w in ("w1", "w3")
    )
    assert (w1.expert, w1.first, w3.first, w3.last) == (2, 0, w1.last, 2 * w1.last)
    gpt2 = {s.name: s for s in stored_tensors(small("gpt2"))}
    fused = gpt2["transformer.h.3.attn.c_attn.weight"]
    assert fused.shape == (32, 96)
    assert fused.transposed
    assert [p.name.split(".")[-2] for p in fused.parts] == ["q_proj", "k_proj", "v_proj"]
    assert gpt2["transformer.h.0.mlp.c_proj.weight"].shape == (128, 32)
    assert "lm_head.weight" not in gpt2  # tied


def test_every_value_of_a_model_is_stored_once() -> None:
    for family in FAMILIES:
        spec = small(family)
        covered: dict[str, int] = {}
        for stored in stored_tensors(spec):
            columns = stored.numel // sum(p.last - p.first for p in stored.parts)
            for part in stored.parts:
                covered[part.name] = covered.get(part.name, 0) + columns * (part.last - part.first)
        assert covered == {p.name: p.numel for p in parameters(spec) if not p.tied}


def test_kimi_k3_as_it_was_released(tmp_path: Path) -> None:
    """Decay rates with zeros behind the last head, and a vision tower that is left out."""
    stage, folder = whole_stage(load_model("kimi_k3_mini")), tmp_path / "k3"
    save_stage(stage, folder)
    name = "language_model.model.layers.0.self_attn.A_log"
    short = name.removeprefix("language_model.")

    def pad(held: dict[str, Tensor], with_: float = 0.0) -> None:
        held[name] = torch.cat((tensors(stage)[short].detach(), torch.full((3,), with_)))
        held["vision_tower.patch_embed.proj.weight"] = torch.ones(2, 2)

    edit(folder, name, pad)
    again = build_stage(stage.spec, stage.layer_numbers)
    load_stage_(again, folder)
    assert all(torch.equal(t, tensors(stage)[n]) for n, t in tensors(again).items())
    edit(folder, name, lambda held: pad(held, 1.0))
    with pytest.raises(InputError, match="numbers stand behind the last head"):
        load_stage_(again, folder)


def test_index_lists_every_tensor_and_the_total(saved: tuple[Stage, Path]) -> None:
    stage, folder = saved
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(stage).values())
    for path in folder.glob("*.safetensors"):
        listed = {k for k, v in index["weight_map"].items() if v == path.name}
        assert load_file(path).keys() == listed
        assert path.stat().st_size < 150_000
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float32"


def test_a_single_file_without_index_is_read(tmp_path: Path) -> None:
    stage = whole_stage(small("llama"))
    save_stage(stage, tmp_path / "model")
    (path,) = (tmp_path / "model").glob("*.safetensors")
    path.rename(path.with_name("model.safetensors"))
    (path.parent / INDEX).unlink()
    again = build_stage(stage.spec, stage.layer_numbers)
    load_stage_(again, path.parent)
    assert torch.equal(again.model.layers["1"].mlp.up_proj.weight, tensors(stage)[
        "model.layers.1.mlp.up_proj.weight"])  # fmt: skip


def test_parts_of_experts_by_rank_and_a_pipeline_stage(saved: tuple[Stage, Path]) -> None:
    stage, folder = saved
    spec, ours = stage.spec, tensors(stage)
    assert spec.moe is not None
    count = spec.moe.num_experts
    part = build_stage(spec, [3, 4], ep_rank=1, ep_size=2)
    load_stage_(part, folder)
    for name, tensor in tensors(part).items():
        whole = ours[name]
        assert torch.equal(tensor, whole[count // 2 :] if ".experts." in name else whole), name


def test_ranks_hand_in_their_own_experts(tmp_path: Path, saved: tuple[Stage, Path]) -> None:
    stage, folder = saved
    spec = stage.spec

    def both_ranks() -> Iterator[tuple[str, Tensor | TensorRows]]:
        for rank in (1, 0):
            local = build_stage(spec, stage.layer_numbers, ep_rank=rank, ep_size=2)
            load_stage_(local, folder)
            for name, value in stage_tensors(local):
                if rank == 1 or isinstance(value, TensorRows):
                    yield name, value

    write_checkpoint(tmp_path / "joined", spec, both_ranks())
    joined = dict(read_tensors(open_checkpoint(tmp_path / "joined")))
    assert all(torch.equal(joined[name], t) for name, t in tensors(stage).items())


def test_a_tied_head_is_not_stored_and_a_stage_without_the_table_gets_it(tmp_path: Path) -> None:
    stage = whole_stage(small("gpt2"))
    save_stage(stage, tmp_path / "model")
    last = build_stage(stage.spec, [3, 4])
    load_stage_(last, tmp_path / "model")
    assert last.lm_head is not None
    assert torch.equal(last.lm_head.weight, tensors(stage)["model.embed_tokens.weight"])


def test_a_stored_head_must_equal_the_table_it_is_tied_to(tmp_path: Path) -> None:
    spec = small("llama").model_copy(update={"tied_embeddings": True})
    stage = whole_stage(spec)
    save_stage(stage, tmp_path / "model")
    table = "model.embed_tokens.weight"
    edit(tmp_path / "model", table, lambda t: t.update({"lm_head.weight": t[table].clone()}))
    load_stage_(build_stage(spec, stage.layer_numbers), tmp_path / "model")
    edit(tmp_path / "model", table, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(InputError, match=r"lm_head\.weight.*differs"):
        load_stage_(build_stage(spec, stage.layer_numbers), tmp_path / "model")


def test_old_gpt2_names_and_masks_are_read(tmp_path: Path) -> None:
    stage = whole_stage(small("gpt2"))
    save_stage(stage, tmp_path / "model")

    def old(held: dict[str, Tensor]) -> None:
        for name in list(held):
            held[name.removeprefix("transformer.")] = held.pop(name)
        held["h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)

    edit(tmp_path / "model", "transformer.wte.weight", old)
    again = build_stage(stage.spec, stage.layer_numbers)
    load_stage_(again, tmp_path / "model")
    assert all(torch.equal(t, tensors(stage)[n]) for n, t in tensors(again).items())


def test_prediction_layers_are_skipped_only_where_the_config_has_them(
    saved: tuple[Stage, Path],
) -> None:
    stage, folder = saved
    name = "model.layers.4.eh_proj.weight"  # layers 0 to 3 are the model's own
    edit(folder, "lm_head.weight", lambda t: t.update({name: torch.ones(2)}))
    with pytest.raises(InputError, match=r"eh_proj.*unexpected"):
        open_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    assert open_checkpoint(folder).spec.num_layers == stage.spec.num_layers


def test_dtype_is_cast_but_not_the_selection_bias(tmp_path: Path) -> None:
    stage = whole_stage(small("deepseek_v3"))
    save_stage(stage, tmp_path / "model", dtype=torch.bfloat16)
    for name, tensor in read_tensors(open_checkpoint(tmp_path / "model")):
        wide = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name
        assert torch.equal(tensor, tensors(stage)[name].to(tensor.dtype))
    cast = dict(read_tensors(open_checkpoint(tmp_path / "model"), dtype=torch.float32))
    assert {t.dtype for t in cast.values()} == {torch.float32}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["torch_dtype"] == (
        "bfloat16"
    )


# What can be wrong with files: each names the file, and the tensor where there is one.

NAME = "model.layers.3.mlp.experts.3.up_proj.weight"


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        for _ in read_tensors(open_checkpoint(folder)):
            pass
    return str(caught.value)


def test_a_missing_tensor(saved: tuple[Stage, Path]) -> None:
    _, folder = saved
    edit(folder, NAME, lambda t: t.pop(NAME))
    assert f"{NAME}: the tensor is missing" in refusal(folder)


def test_a_missing_tensor_that_the_index_lists(saved: tuple[Stage, Path]) -> None:
    _, folder = saved
    before = (folder / INDEX).read_text()
    path = edit(folder, NAME, lambda t: t.pop(NAME))
    (folder / INDEX).write_text(before)
    message = refusal(folder)
    assert path.name in message
    assert NAME in message


def test_a_wrong_shape(saved: tuple[Stage, Path]) -> None:
    _, folder = saved
    path = edit(folder, NAME, lambda t: t.update({NAME: torch.ones(3, 5)}))
    message = refusal(folder)
    assert path.name in message
    assert f"{NAME} ([3, 5]): wrong shape" in message


def test_an_unexpected_tensor(saved: tuple[Stage, Path]) -> None:
    _, folder = saved
    odd = NAME + "_scale_inv"
    path = edit(folder, NAME, lambda t: t.update({odd: torch.ones(1)}))
    message = refusal(folder)
    assert path.name in message
    assert f"{odd}: unexpected tensor" in message
    assert "must name the format in its quantization_config" in message


def test_a_tensor_outside_the_index(saved: tuple[Stage, Path]) -> None:
    _, folder = saved
    before = (folder / INDEX).read_text()
    edit(folder, NAME, lambda t: t.update({"x": torch.ones(1)}))
    (folder / INDEX).write_text(before)
    assert "x: the tensor is not in the index" in refusal(folder)


def test_a_dtype_that_is_no_weight(saved: tuple[Stage, Path]) -> None:
    _, folder = saved
    path = edit(folder, NAME, lambda t: t.update({NAME: t[NAME].to(torch.float8_e4m3fn)}))
    message = refusal(folder)
    assert path.name in message
    assert f"{NAME} (F8_E4M3)" in message


def test_many_problems_are_cut_short(saved: tuple[Stage, Path]) -> None:
    _, folder = saved
    for path in folder.glob("*.safetensors"):
        save_file({}, path)
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {"a": sorted(folder.glob("*.safetensors"))[0].name}})
    )
    with pytest.raises(InputError) as caught:
        open_checkpoint(folder)
    assert len(caught.value.violations) <= 21


def test_a_shard_cut_anywhere_names_the_file(saved: tuple[Stage, Path]) -> None:
    _, folder = saved
    index = json.loads((folder / INDEX).read_text())
    path = folder / index["weight_map"][NAME]
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + header])
    for length in (0, 5, 8, 100, 8 + header - 1, 8 + header, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        message = refusal(folder)
        assert path.name in message
        kept = length - 8 - header
        if kept >= 0:
            cut = next(
                name
                for name, entry in sorted(
                    ((k, v) for k, v in entries.items() if k != "__metadata__"),
                    key=lambda item: item[1]["data_offsets"],
                )
                if entry["data_offsets"][1] > kept
            )
            assert f"{cut} (" in message
            assert "truncated" in message


def test_a_flipped_bit_names_file_and_tensor(saved: tuple[Stage, Path]) -> None:
    _, folder = saved
    index = json.loads((folder / INDEX).read_text())
    path = folder / index["weight_map"][NAME]
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little")
    begin, _end = json.loads(data[8 : 8 + header])[NAME]["data_offsets"]
    data[8 + header + begin + 2] ^= 0x10
    path.write_bytes(data)
    message = refusal(folder)
    assert path.name in message
    assert NAME in message


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        '{"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}',
        '{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": [1]}',
        '{"__metadata__": {"x": 1}}',
        '{"__metadata__": 3}',
        "[]",
        "{",
        "{}",
    ],
)
def test_a_broken_header_names_the_file(text: str, tmp_path: Path) -> None:
    stage = whole_stage(small("llama"))
    save_stage(stage, tmp_path / "model")
    (path,) = (tmp_path / "model").glob("*.safetensors")
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + b"\0" * 4)
    assert path.name in refusal(tmp_path / "model")


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "x.bin", "", 3, None])
def test_an_index_that_leads_elsewhere(file: Any, saved: tuple[Stage, Path]) -> None:
    _, folder = saved
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NAME] = file
    (folder / INDEX).write_text(json.dumps(index))
    message = refusal(folder)
    assert INDEX in message
    assert NAME in message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_broken_index(text: str, saved: tuple[Stage, Path]) -> None:
    _, folder = saved
    (folder / INDEX).write_text(text)
    assert INDEX in refusal(folder)


def test_missing_files(saved: tuple[Stage, Path], tmp_path: Path) -> None:
    _, folder = saved
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    assert gone.name in refusal(folder)
    (tmp_path / "empty").mkdir()
    assert "config.json" in refusal(tmp_path / "empty")
    with pytest.raises(InputError, match=INDEX):
        open_checkpoint(tmp_path / "empty", small("llama"))


def test_a_checkpoint_of_another_model(saved: tuple[Stage, Path]) -> None:
    _, folder = saved
    with pytest.raises(InputError, match="wrong shape"):
        load_stage_(build_stage(small("deepseek_v3").model_copy(update={"vocab_size": 48}), [-1]),
                    folder)  # fmt: skip


# What can be wrong with tensors handed in: nothing is left behind.


def left_behind(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir()]


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "twice", "crash", "cut experts"])
def test_wrong_tensors_leave_nothing(fault: str, tmp_path: Path) -> None:
    stage = whole_stage(small("qwen3_moe"))
    name, stacked = (
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.mlp.experts.down_proj",
    )

    def faulty() -> Iterator[tuple[str, Tensor | TensorRows]]:
        for key, value in stage_tensors(stage):
            if fault == "missing" and key == name:
                continue
            if fault == "cut experts" and key == stacked:
                assert isinstance(value, TensorRows)
                value = TensorRows(value.tensor[:-1], 0)
            if fault == "shape" and key == name:
                assert isinstance(value, Tensor)
                value = value[1:]
            yield key, value
        if fault == "twice":
            yield name, tensors(stage)[name]
        if fault == "unknown":
            yield name + "x", tensors(stage)[name]
        if fault == "crash":
            raise RuntimeError("the source broke")

    expected = {"crash": "the source broke", "cut experts": stacked}.get(fault, name)
    with pytest.raises((InputError, RuntimeError), match=expected.replace(".", r"\.")):
        write_checkpoint(tmp_path / "model", stage.spec, faulty(), max_shard_bytes=20_000)
    assert left_behind(tmp_path) == []


def test_nothing_is_overwritten(saved: tuple[Stage, Path]) -> None:
    stage, folder = saved
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(InputError, match="something here already"):
        save_stage(stage, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert left_behind(folder.parent) == ["model"]


def test_an_unknown_family_has_no_layout(tmp_path: Path) -> None:
    spec = small("llama").model_copy(update={"family": "llamma"})
    with pytest.raises(InputError, match="llamma"):
        write_checkpoint(tmp_path / "model", spec, [])
    with pytest.raises(InputError, match="llamma"):
        list(stored_tensors(spec))


# Streaming: what is in memory is one shard and one tensor, however large the model.


@pytest.fixture
def new_tensor_bytes() -> Iterator[Callable[[], int]]:
    """Bytes of the tensors made since, each storage once."""

    def count() -> int:
        made = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
        return sum({(s := t.untyped_storage()).data_ptr(): s.nbytes() for t in made}.values())

    gc.freeze()  # what exists by now is not among get_objects()
    yield count
    gc.unfreeze()


@pytest.mark.slow
def test_writing_and_reading_hold_one_shard_and_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_tensor_bytes: Callable[[], int]
) -> None:
    spec = load_model("mixtral_8x7b").shrunk(
        hidden_size=128, num_layers=16, vocab_size=64, max_seq_len=64
    )
    sizes = {p.name: p.numel * 4 for p in parameters(spec)}
    total, largest, shard = sum(sizes.values()), max(sizes.values()), 2_500_000
    assert total > 8 * (shard + 1.2 * largest)
    peak = 0

    def watch() -> None:
        nonlocal peak
        peak = max(peak, new_tensor_bytes())

    def source() -> Iterator[tuple[str, Tensor]]:
        for p in parameters(spec):
            yield p.name, torch.zeros(p.shape)
            watch()

    real = write.save_file

    def watched_save(held: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        watch()
        real(held, path, metadata)

    monkeypatch.setattr(write, "save_file", watched_save)
    tracemalloc.start()  # what Python itself allocates, such as copies into bytes
    write_checkpoint(tmp_path / "model", spec, source(), max_shard_bytes=shard)
    python_peak = tracemalloc.get_traced_memory()[1]
    # A shard, the tensor handed in, and the copy of a part of it.
    assert shard / 2 < peak <= shard + 1.2 * largest
    assert python_peak < total / 50

    peak = 0
    tracemalloc.reset_peak()
    for _name, _tensor in read_tensors(read.open_checkpoint(tmp_path / "model")):
        watch()
    python_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    shutil.rmtree(tmp_path / "model")
    assert largest <= peak <= 1.2 * largest
    assert python_peak < total / 50


def test_the_first_weights_survive_a_round_trip(tmp_path: Path) -> None:
    spec = small("qwen3")
    stage = build_stage(spec, range(-1, spec.num_layers + 1))
    init_weights_(stage, spec, seed=1)
    tokens = torch.arange(12).reshape(2, 6)
    save_stage(stage, tmp_path / "model")
    again = build_stage(spec, stage.layer_numbers)
    load_stage_(again, tmp_path / "model")
    assert torch.equal(stage(tokens), again(tokens))
