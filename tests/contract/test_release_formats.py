"""torchao and compressed-tensors make the same bits; transformers loads block FP8.

`.ci/targets.sh` makes their environment; FLOPWRIGHT_EXPORT_TARGETS names its folder.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flopwright.models.formats import mx
from flopwright.models.formats.codecs import decode, encode
from flopwright.models.formats.layout import LAYOUTS
from flopwright.models.formats.quantization_config import quantization_config
from flopwright.models.hf.config import model_from_hf_config
from flopwright.models.hf.safetensors_io import load_stage_, save_stage
from flopwright.models.transformer.module import Stage, build_stage, init_weights_
from flopwright.spec.load import load_model
from flopwright.spec.model import ModelSpec

Need = Callable[[str, bool, str], None]
Ask = Callable[[str, Path], Any]
pytestmark = pytest.mark.slow

# Each prints one JSON object: by case, what differs.
TORCHAO: Final = """
import json, sys, torch
from safetensors.torch import load_file
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
kinds = {"e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
held = load_file(sys.argv[1])
wrong = {}
for case in {name.rsplit("/", 1)[0] for name in held if name.count("/") == 3}:
    dtype, rule, kind = case.split("/")
    x = held[dtype + "/x"]
    scales, numbers = to_mx(x, kinds[kind], 32, ScaleCalculationMode[rule.upper()])
    for name, theirs in (("numbers", numbers), ("scales", scales)):
        ours = held[f"{case}/{name}"]
        wrong[f"{case}/{name}"] = int((theirs.view(torch.uint8) != ours.view(torch.uint8)).sum())
print(json.dumps(wrong))
"""
COMPRESSED: Final = """
import json, sys, torch
from safetensors.torch import load_file
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams
kinds = {"int4_g32": PackedQuantizationCompressor, "mxfp4": MXFP4PackedCompressor}
held = load_file(sys.argv[1])
configs = json.loads(open(sys.argv[1] + ".json").read())
wrong = {}
for kind, compressor in kinds.items():
    config = QuantizationConfig.model_validate(configs[kind])
    scheme = config.config_groups["group_0"]
    for dtype in ("bfloat16", "float32"):
        x = held[dtype + "/x"]
        groups = x.unflatten(-1, (-1, 32))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        if kind == "int4_g32":
            scale = scale.to(torch.bfloat16)
        state = {"weight": x, "weight_scale": scale, "weight_zero_point": zero}
        ours = {n: held[f"{dtype}/{kind}/{n}"] for n in compressor.compression_param_names(scheme)}
        for name, theirs in compressor.compress(state, scheme).items():
            same = theirs.dtype == ours[name].dtype and torch.equal(theirs, ours[name])
            wrong[f"{dtype}/{kind}/{name}"] = int(not same)
        back = compressor.decompress(dict(ours), scheme)["weight"]
        wrong[f"{dtype}/{kind}/back"] = int(
            (back != held[f"{dtype}/{kind}/decoded"].to(back.dtype)).sum()
        )
print(json.dumps(wrong))
"""
TRANSFORMERS: Final = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
folder = Path(sys.argv[1])
model, report = AutoModelForCausalLM.from_pretrained(
    folder / "model", dtype=torch.float32, output_loading_info=True
)
tokens = load_file(folder / "tokens.safetensors")["tokens"]
with torch.no_grad():
    save_file({"logits": model.eval()(tokens).logits.contiguous()}, folder / "logits.safetensors")
save_file({n: t.contiguous() for n, t in model.state_dict().items()}, folder / "state.safetensors")
print(json.dumps({k: sorted(map(str, v)) for k, v in report.items()}))
"""


@pytest.fixture
def ask(need_service: Need, tmp_path: Path) -> Ask:
    """Returns (script, path) -> what the script prints of it in the libraries' environment."""
    folder = os.environ.get("FLOPWRIGHT_EXPORT_TARGETS", "")
    python = Path(folder) / "formats" / "bin" / "python"
    how = ". .ci/targets.sh, which sets FLOPWRIGHT_EXPORT_TARGETS"
    need_service("torchao and compressed-tensors", bool(folder) and python.exists(), how)

    def run(script: str, path: Path) -> Any:
        done = subprocess.run(
            [str(python), "-c", script, str(path)],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env={**os.environ, "HOME": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def matrices() -> dict[str, Tensor]:
    """Rows of very different sizes; rows of zeros and of negative zeros among them."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(256, 256, generator=generator)
    x = x * torch.exp2(torch.randint(-40, 40, (256, 1), generator=generator).float())
    x[3], x[4, 32:64], x[5] = 0, 0, -0.0
    return {"float32": x, "bfloat16": x.bfloat16()}


def test_mxfp4_and_mxfp8_bits_are_torchaos(ask: Ask, tmp_path: Path) -> None:
    held: dict[str, Tensor] = {}
    for dtype, x in matrices().items():
        held[f"{dtype}/x"] = x
        for rule in mx.SCALE_RULES:
            cases = {
                "e2m1": mx.quantize_e2m1(x, rule),
                "e4m3": mx.quantize_fp8(x, rule, "e4m3"),
                "e5m2": mx.quantize_fp8(x, rule, "e5m2"),
            }
            for kind, (numbers, scales) in cases.items():
                held[f"{dtype}/{rule}/{kind}/numbers"] = numbers.view(torch.uint8)
                held[f"{dtype}/{rule}/{kind}/scales"] = scales
    save_file(held, tmp_path / "held")
    wrong = ask(TORCHAO, tmp_path / "held")
    assert len(wrong) == 2 * len(mx.SCALE_RULES) * 3 * 2
    assert {k: v for k, v in wrong.items() if v} == {}


def test_int4_and_mxfp4_bits_are_those_of_compressed_tensors(ask: Ask, tmp_path: Path) -> None:
    held: dict[str, Tensor] = {}
    kinds = {n: LAYOUTS[n] for n in ("int4_g32", "mxfp4")}  # type: ignore[index]
    for dtype, x in matrices().items():
        x = x.float().clamp(-1e4, 1e4).to(x.dtype)  # it makes scales in bf16
        x = torch.where(x == 0, 0, x)  # it drops the sign of a zero, which torchao keeps
        held[f"{dtype}/x"] = x
        for kind, layout in kinds.items():
            parts = encode(layout, x, "even")
            held |= {f"{dtype}/{kind}/{k[1:]}": v for k, v in parts.items()}
            held[f"{dtype}/{kind}/decoded"] = decode(layout, parts)
    save_file(held, tmp_path / "held")
    configs = {k: quantization_config(layout) for k, layout in kinds.items()}
    (tmp_path / "held.json").write_text(json.dumps(configs))
    wrong = ask(COMPRESSED, tmp_path / "held")
    assert len(wrong) == 2 * (4 + 3)
    assert {k: v for k, v in wrong.items() if v} == {}


@pytest.mark.parametrize(("experts", "top_k"), [(4, 4), (16, 3)])
def test_a_shrunk_k2_in_block_fp8_loads_in_transformers(
    experts: int, top_k: int, ask: Ask, tmp_path: Path
) -> None:
    """Its weights are ours bit for bit, its logits ours; and near those of the bf16 model.

    Matrices of at most 128 or whole multiples of it: transformers 5.24 takes no edge blocks.
    """
    stage = _shrunk_k2(experts, top_k)
    save_stage(stage, tmp_path / "model", max_shard_bytes=1_000_000, release="block_fp8")
    tokens = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(6))
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    report = ask(TRANSFORMERS, tmp_path)
    assert not any(report.values()), report

    loaded = build_stage(model_from_hf_config(tmp_path / "model"), range(-1, 4))
    load_stage_(loaded, tmp_path / "model")
    ours = dict((*loaded.named_parameters(), *loaded.named_buffers()))
    state = load_file(tmp_path / "state.safetensors")
    assert state.keys() == ours.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor.float(), ours[name].float()), name
    theirs = load_file(tmp_path / "logits.safetensors")["logits"]
    with torch.no_grad():
        logits, gap = _logits_and_gap(loaded, tokens)
        for layer, block in stage.float().moe_blocks().items():
            block.routing_replay = loaded.moe_blocks()[layer].last_choices
        wide = stage(tokens)
    # No choice of experts hangs on rounding: those of fp32 are a hundred times smaller.
    assert gap > 1e-4
    assert (logits - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    # E4M3 keeps a number to 1 part in 16 at worst, to 1 in 40 in the mean. The same experts
    # answer: a choice between them that falls out otherwise is no error of the numbers.
    error = (logits - wide).norm() / wide.norm()
    assert 1e-4 < error < 0.1


def _shrunk_k2(experts: int, top_k: int) -> Stage:
    """Returns a Kimi K2 of three small layers in bf16, whose experts differ in their biases."""
    spec = load_model("kimi_k2").shrunk(hidden_size=256, num_layers=3, vocab_size=512)
    assert spec.moe is not None
    attention = spec.attention.model_copy(
        update={"num_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 96, "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 32, "v_head_dim": 32}
    )  # fmt: skip
    sizes = {"expert_intermediate_size": 128, "num_experts": experts, "top_k": top_k}
    moe, mlp = spec.moe.model_copy(update=sizes), {"intermediate_size": 512}
    spec = spec.model_copy(
        update={"attention": attention, "moe": moe, "mlp": spec.mlp.model_copy(update=mlp)}
    )
    stage = build_stage(spec, range(-1, 4), dtype=torch.bfloat16)
    init_weights_(stage, spec, seed=5)
    for block in stage.moe_blocks().values():
        bias = block.gate.e_score_correction_bias
        assert bias is not None
        bias.copy_(0.05 * torch.randn(experts, generator=torch.Generator().manual_seed(3)))
    return stage


def _logits_and_gap(stage: Stage, tokens: Tensor) -> tuple[Tensor, float]:
    """Returns the logits, and how near a token's last chosen expert was to the next."""
    gaps = [1.0]

    def look(gate: Any, args: Any, _: Any) -> None:
        scores = torch.sigmoid(args[0] @ gate.weight.t()) + gate.e_score_correction_bias
        last = scores.sort(-1, descending=True).values[:, gate.spec.top_k - 1 :]
        gaps.extend((last[:, :1] - last[:, 1:2]).flatten().tolist())

    hooks = [b.gate.register_forward_hook(look) for b in stage.moe_blocks().values()]
    logits = stage(tokens)
    for hook in hooks:
        hook.remove()
    return logits, min(gaps)


def test_a_small_gpt_oss_in_mxfp4_loads_in_transformers(ask: Ask, tmp_path: Path) -> None:
    data = load_model("gpt_oss_20b").to_data()
    data |= {"hidden_size": 64, "num_layers": 2, "vocab_size": 96, "max_seq_len": 64}
    data["attention"] |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "sliding_window": 7}
    data["mlp"]["intermediate_size"] = 96
    data["moe"] |= {"num_experts": 4, "top_k": 4, "expert_intermediate_size": 96}
    spec = ModelSpec.model_validate(data)
    stage = build_stage(spec, range(-1, 3), dtype=torch.bfloat16)
    init_weights_(stage, spec, seed=5)
    save_stage(stage, tmp_path / "model", release="mxfp4")
    tokens = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    report = ask(TRANSFORMERS, tmp_path)
    assert not any(report.values()), report
    loaded = build_stage(spec, range(-1, 3))
    load_stage_(loaded, tmp_path / "model")
    with torch.no_grad():
        logits = loaded(tokens)
    theirs = load_file(tmp_path / "logits.safetensors")["logits"]
    assert (logits - theirs).abs().max() <= 1e-5 * theirs.abs().max()
