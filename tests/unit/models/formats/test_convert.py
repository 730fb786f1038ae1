"""Folders from format to format: values, files, memory, and every way a folder can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flopwright.errors import InputError
from flopwright.models.formats import convert
from flopwright.models.formats.codecs import decode, encode
from flopwright.models.formats.job import plan_job
from flopwright.models.formats.layout import LAYOUTS
from flopwright.models.hf.safetensors_io import (
    load_stage_,
    open_checkpoint,
    read_tensors,
    save_stage,
)
from flopwright.models.transformer.module import Stage, build_stage
from flopwright.spec.load import load_model
from flopwright.spec.model import ModelSpec

FORMATS = ("block_fp8", "int4_g32", "mxfp4")
EXPERT = "model.layers.1.mlp.experts.2.up_proj"
QUERY = "model.layers.0.self_attn.q_b_proj"


def small() -> ModelSpec:
    """A Kimi K2 with edge blocks in every format's way."""
    spec = load_model("kimi_k2").shrunk(hidden_size=160, num_layers=2, vocab_size=96)
    assert spec.moe is not None
    sizes = {"expert_intermediate_size": 96, "num_experts": 4, "top_k": 2}
    return spec.model_copy(update={"moe": spec.moe.model_copy(update=sizes)})


def whole_stage(spec: ModelSpec, seed: int = 7) -> Stage:
    stage = build_stage(spec, range(-1, spec.num_layers + 1), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*stage.parameters(), *stage.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return stage


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint in several shards, a tokenizer and a foreign weight file beside it."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    save_stage(whole_stage(small()), folder, max_shard_bytes=200_000)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"never copied")
    return folder


@pytest.fixture(scope="module")
def released(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same in every format."""
    out = tmp_path_factory.mktemp("released")
    for name in FORMATS:
        convert.run(plan_job(plain, out / name, name, max_shard_bytes=100_000))
    return {name: out / name for name in FORMATS}


def stored(folder: Path) -> dict[str, Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def edit(folder: Path, name: str, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Changes the tensors of the file that holds `name`, the index following."""
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    path = folder / index["weight_map"][name]
    held = load_file(path)
    change(held)
    save_file(held, path)
    kept = {k: v for k, v in index["weight_map"].items() if v != path.name}
    file.write_text(
        json.dumps({**index, "weight_map": {**kept, **dict.fromkeys(held, path.name)}})
    )


def copy_of(folder: Path, tmp_path: Path) -> Path:
    there = tmp_path / "copy"
    there.mkdir()
    for path in folder.iterdir():
        (there / path.name).write_bytes(path.read_bytes())
    return there


@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_is_what_the_codec_makes_of_it(
    name: str, plain: Path, released: dict[str, Path]
) -> None:
    before, after = stored(plain), stored(released[name])
    layout = next(x for n, x in LAYOUTS.items() if n == name)
    expected: dict[str, Tensor] = {}
    for weight, tensor in before.items():
        covered = ".experts." in weight or (
            name == "block_fp8" and "_proj" in weight and tensor.ndim == 2
        )
        if covered:
            base = weight.removesuffix(".weight")
            expected |= {base + k: v for k, v in encode(layout, tensor).items()}
        else:
            expected[weight] = tensor
    assert after.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tensor.dtype == after[key].dtype, key
        assert torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8)), key


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_of_any_size_give_the_same_file(
    name: str, plain: Path, released: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(convert, "PIECE_ELEMENTS", 1000)
    monkeypatch.setattr(convert, "_COPIED_BYTES", 777)
    convert.run(plan_job(plain, tmp_path / "again", name, max_shard_bytes=100_000))
    for path in released[name].iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_reads_and_writes_the_format(
    name: str, released: dict[str, Path], tmp_path: Path
) -> None:
    stage = whole_stage(small())
    save_stage(stage, tmp_path / "saved", release=name)
    first, second = stored(tmp_path / "saved"), stored(released[name])
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key].view(torch.uint8), second[key].view(torch.uint8)), key
    configs = [json.loads((f / "config.json").read_text()) for f in (tmp_path / "saved",
        released[name])]  # fmt: skip
    assert configs[0] == configs[1]
    loaded = build_stage(small(), range(-1, 3), dtype=torch.float32)
    load_stage_(loaded, released[name])
    layout = next(x for n, x in LAYOUTS.items() if n == name)
    parts = {p.ending: second[EXPERT + p.ending] for p in layout.parts}
    ours = dict(loaded.named_parameters())["model.layers.1.mlp.experts.gate_up_proj"][2, 96:]
    assert torch.equal(ours, decode(layout, parts))


@pytest.mark.parametrize("name", FORMATS)
def test_back_to_bf16(name: str, plain: Path, released: dict[str, Path], tmp_path: Path) -> None:
    convert.run(plan_job(released[name], tmp_path / "back", "bf16"))
    decoded = dict(read_tensors(open_checkpoint(released[name])))
    back = dict(read_tensors(open_checkpoint(tmp_path / "back")))
    for key, tensor in back.items():
        assert torch.equal(tensor, decoded[key].to(tensor.dtype)), key
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == json.loads((plain / "config.json").read_text())


@pytest.mark.parametrize("name", FORMATS)
def test_between_formats_goes_without_bf16_between(
    name: str, released: dict[str, Path], tmp_path: Path
) -> None:
    convert.run(plan_job(released["block_fp8"], tmp_path / "out", name))
    fp8, out = stored(released["block_fp8"]), stored(tmp_path / "out")
    layout = LAYOUTS["block_fp8"]
    values = decode(layout, {p.ending: fp8[EXPERT + p.ending] for p in layout.parts})
    wanted = next(x for n, x in LAYOUTS.items() if n == name)
    parts = encode(wanted, values)
    if name == "block_fp8":  # its own format is copied
        parts = {p.ending: fp8[EXPERT + p.ending] for p in layout.parts}
    for ending, tensor in parts.items():
        assert torch.equal(out[EXPERT + ending].view(torch.uint8), tensor.view(torch.uint8))
    assert out[QUERY + ".weight"].dtype == (
        torch.float8_e4m3fn if name == "block_fp8" else torch.bfloat16
    )


def test_files_are_small_aligned_indexed_and_complete(released: dict[str, Path]) -> None:
    folder = released["mxfp4"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored(folder).values())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        names = {k for k, v in index["weight_map"].items() if v == path.name}
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == names
            assert file.metadata()["format"] == "pt"
        assert path.stat().st_size < 150_000
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert not (folder / "pytorch_model.bin").exists()


def test_scales_may_lie_in_another_file(released: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_of(released["block_fp8"], tmp_path)
    name = QUERY + ".weight_scale_inv"
    moved: dict[str, Tensor] = {}
    edit(folder, name, lambda held: moved.update({name: held.pop(name)}))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    other = sorted(set(index["weight_map"].values()))[-1]
    anchor = next(k for k, v in index["weight_map"].items() if v == other)
    edit(folder, anchor, lambda held: held.update(moved))
    convert.run(plan_job(folder, tmp_path / "out", "bf16"))
    before = dict(read_tensors(open_checkpoint(released["block_fp8"]), dtype=torch.bfloat16))
    for key, tensor in read_tensors(open_checkpoint(tmp_path / "out")):
        assert torch.equal(tensor, before[key]), key


def test_wide_weights_become_bf16_and_wide_buffers_stay(plain: Path, tmp_path: Path) -> None:
    folder = copy_of(plain, tmp_path)
    for path in folder.glob("*.safetensors"):
        save_file({k: v.float() for k, v in load_file(path).items()}, path)
    convert.run(plan_job(folder, tmp_path / "out", "mxfp4"))
    after = stored(tmp_path / "out")
    assert after["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert after["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def small_gpt_oss() -> ModelSpec:
    data = load_model("gpt_oss_20b").to_data()
    data |= {"hidden_size": 64, "num_layers": 2, "vocab_size": 96, "max_seq_len": 64}
    data["attention"] |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "sliding_window": 7}
    data["mlp"]["intermediate_size"] = 96
    data["moe"] |= {"num_experts": 3, "top_k": 2, "expert_intermediate_size": 96}
    return ModelSpec.model_validate(data)


def test_gpt_oss_stacks(tmp_path: Path) -> None:
    """Its experts stand transposed where they are not quantised, as in transformers."""
    stage, folder = whole_stage(small_gpt_oss()), tmp_path / "plain"
    save_stage(stage, folder)
    name, layout = "model.layers.1.mlp.experts", LAYOUTS["mxfp4_blocks"]
    ours, weights = dict(stage.named_parameters()), stored(folder)
    gate_up = weights[f"{name}.gate_up_proj"]
    assert gate_up.shape == (3, 64, 192)
    for half, first in ((0, 0), (1, 96)):  # gate and up in turn
        rows = ours[f"{name}.gate_up_proj"][:, first : first + 96].detach()
        assert torch.equal(gate_up[..., half::2].transpose(1, 2), rows)
        bias = ours[f"{name}.gate_up_proj_bias"][:, first : first + 96].detach()
        assert torch.equal(weights[f"{name}.gate_up_proj_bias"][:, half::2], bias)

    job = plan_job(folder, tmp_path / "mxfp4", "mxfp4")
    assert job.checked
    convert.run(job)
    out = stored(tmp_path / "mxfp4")
    assert out[f"{name}.gate_up_proj_blocks"].shape == (3, 192, 2, 16)
    assert out[f"{name}.down_proj_scales"].shape == (3, 64, 3)
    for e in range(3):
        for leaf in ("gate_up_proj", "down_proj"):
            parts = encode(layout, weights[f"{name}.{leaf}"][e].t())
            for ending, tensor in parts.items():
                assert torch.equal(out[f"{name}.{leaf}{ending}"][e], tensor)
    save_stage(stage, tmp_path / "saved", release="mxfp4")
    saved = stored(tmp_path / "saved")
    assert saved.keys() == out.keys()
    assert all(torch.equal(saved[k], out[k]) for k in out)
    said = json.loads((tmp_path / "mxfp4" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "mxfp4"

    convert.run(plan_job(tmp_path / "mxfp4", tmp_path / "back", "bf16"))
    back = stored(tmp_path / "back")
    assert back.keys() == weights.keys()
    for e in range(3):
        parts = {k: out[f"{name}.down_proj{k}"][e] for k in ("_blocks", "_scales")}
        assert torch.equal(back[f"{name}.down_proj"][e].float(), decode(layout, parts).t())
    whole, part = (
        dict(read_tensors(open_checkpoint(f), experts=r, layers=[1]))
        for f, r in ((tmp_path / "back", None), (tmp_path / "mxfp4", range(1, 3)))
    )
    for key in (f"{name}.gate_up_proj", f"{name}.gate_up_proj_bias", f"{name}.down_proj"):
        assert torch.equal(whole[key][1:3].float(), part[key].float()), key
    with pytest.raises(InputError, match="stacked experts have no layout in block_fp8"):
        plan_job(folder, tmp_path / "fp8", "block_fp8")


def test_a_family_that_is_not_known_is_converted_by_names(tmp_path: Path) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "of_nobody"}')
    weights = {
        "model.layers.0.mlp.experts.0.w1.weight": torch.randn(4, 64).bfloat16(),
        "vision_tower.layers.0.mlp.up_proj.weight": torch.randn(4, 64).bfloat16(),
        "counter": torch.tensor(3),
    }
    save_file(weights, folder / "model.safetensors")
    job = plan_job(folder, tmp_path / "out", "mxfp4")
    assert not job.checked
    assert job.counts == (1, 2)
    convert.run(job)
    assert stored(tmp_path / "out")["counter"].item() == 3


def _lose_scale(folder: Path) -> None:
    edit(folder, QUERY + ".weight", lambda held: held.pop(QUERY + ".weight_scale_inv"))


def _orphan(folder: Path) -> None:
    edit(folder, QUERY + ".weight", lambda held: held.pop(QUERY + ".weight"))


def _wrong_scale(folder: Path) -> None:
    name = QUERY + ".weight_scale_inv"
    edit(folder, name, lambda held: held.update({name: torch.ones(9, 9)}))


def _wrong_weight(folder: Path) -> None:
    name = "model.norm.weight"
    edit(folder, name, lambda held: held.update({name: torch.ones(7)}))


def _truncate(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])


def _method(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (folder / "config.json").write_text(json.dumps(config))


def _undeclared(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


def _lose_file(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].unlink()


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing scales": (_lose_scale, r"q_b_proj\.weight: its weight_scale_inv is missing"),
    "scales alone": (_orphan, "q_b_proj.weight_scale_inv: scales of a weight that is not there"),
    "wrong scales": (_wrong_scale, r"weight_scale_inv \(\[9, 9\]\): wrong shape for a weight"),
    "wrong weight": (_wrong_weight, r"model\.norm\.weight \(\[7\]\): wrong shape"),
    "truncated": (_truncate, "truncated inside this tensor"),
    "method": (_method, r"quant_method \('gptq'\): no such format is known"),
    "undeclared": (_undeclared, "config.json has no quantization_config"),
    "no file": (_lose_file, "cannot read the file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_before_anything_is_written(
    case: str, released: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy_of(released["block_fp8"], tmp_path)
    change, words = BROKEN[case]
    change(folder)
    with pytest.raises(InputError, match=words):
        plan_job(folder, tmp_path / "out", "bf16")
    assert not (tmp_path / "out").exists()


def test_what_only_the_bytes_tell_leaves_nothing_behind(
    plain: Path, released: dict[str, Path], tmp_path: Path
) -> None:
    """Numbers that are none; a shape that is not the weight's; bytes that changed."""
    name = "model.norm.weight"
    folder = copy_of(plain, tmp_path)
    edit(folder, EXPERT + ".weight", lambda h: h[EXPERT + ".weight"].fill_(torch.inf))
    with pytest.raises(InputError, match=r"experts\.2\.up_proj\.weight: holds numbers"):
        convert.run(plan_job(folder, tmp_path / "out", "mxfp4"))
    int4 = copy_of(released["int4_g32"], tmp_path / "copy")
    shape = EXPERT + ".weight_shape"
    edit(int4, shape, lambda h: h.update({shape: torch.tensor([1, 2])}))
    with pytest.raises(InputError, match="says another shape"):
        convert.run(plan_job(int4, tmp_path / "out", "bf16"))
    (tmp_path / "b").mkdir()
    altered = copy_of(plain, tmp_path / "b")
    index = json.loads((altered / "model.safetensors.index.json").read_text())
    path = altered / index["weight_map"][name]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="not those that were written"):
        convert.run(plan_job(altered, tmp_path / "out", "block_fp8"))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".tmp-*"))


def test_targets_that_cannot_be(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"int3.*limit: bf16, block_fp8, int4_g32, mxfp4"):
        plan_job(plain, tmp_path / "out", "int3")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InputError, match="something here already"):
        plan_job(plain, tmp_path / "full", "bf16")
    dense = load_model("llama_mini")
    stage = build_stage(dense, range(-1, dense.num_layers + 1))
    save_stage(stage, tmp_path / "dense")
    with pytest.raises(InputError, match=r"no matrix here .* int4_g32 releases quantise"):
        plan_job(tmp_path / "dense", tmp_path / "out", "int4_g32")
    narrow = small()
    assert narrow.moe is not None
    moe = narrow.moe.model_copy(update={"expert_intermediate_size": 72})
    save_stage(whole_stage(narrow.model_copy(update={"moe": moe})), tmp_path / "narrow")
    with pytest.raises(InputError, match=r"down_proj\.weight \(72\): mxfp4 needs whole blocks"):
        plan_job(tmp_path / "narrow", tmp_path / "out", "mxfp4")


def test_a_stop_on_the_way_leaves_nothing(plain: Path, tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert.run(plan_job(plain, tmp_path / "out", "mxfp4"), progress=stop)
    assert list(tmp_path.iterdir()) == []


PEAK = """
import resource, sys
from pathlib import Path
from flopwright.models.formats import convert
from flopwright.models.formats.job import plan_job
folder, out, to = map(str, sys.argv[1:])
job = plan_job(Path(folder), Path(out) / "first", to)

convert.PIECE_ELEMENTS = 2**18
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert.run(job)
print(job.read_bytes, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["block_fp8", "int4_g32", "mxfp4"])
def test_memory_does_not_grow_with_the_model(to: str, tmp_path: Path) -> None:
    """One expert tensor of 128 MB in one shard: the peak is some pieces, not the tensor."""
    folder = tmp_path / "big"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "of_nobody"}')
    weight = torch.zeros(2**15, 2**11, dtype=torch.bfloat16)
    save_file(
        {"model.layers.0.mlp.experts.0.up_proj.weight": weight}, folder / "model.safetensors"
    )
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), str(tmp_path), to],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    read, grown = map(int, done.stdout.split())
    assert read == 2**27
    # Libraries load on first use: some megabytes beside the pieces.
    assert grown <= convert.BYTES_AN_ELEMENT * 2**18 + 2**24
