"""Kimi Delta Attention and attention residuals equal fla's functions in plain torch.

`.ci/targets.sh` makes its environment; FLOPWRIGHT_EXPORT_TARGETS names its folder. fla computes
in fp32 whatever it is given, so bounds are fp32's: a part in 10^5 of the largest value.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flopwright.kernels.attn_res.op import attn_res
from flopwright.kernels.kda.op import kda
from flopwright.kernels.kda.reference import recurrent
from flopwright.kernels.kda_gate.op import kda_gate

Need = Callable[[str, bool, str], None]
BOUND: Final = 1e-5
SCALE: Final = 0.3

# Results and gradients of everything, for the inputs of a file.
SCRIPT: Final = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from fla.ops.attnres.naive import naive_attnres
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda
folder = Path(sys.argv[1])
given = load_file(folder / "inputs.safetensors")
out = {}

def keep(name, leaves, results, grads):
    found = torch.autograd.grad(results, leaves, grads)
    for i, t in enumerate(results):
        out[f"{name}.out{i}"] = t.detach().contiguous()
    for i, t in enumerate(found):
        out[f"{name}.grad{i}"] = t.contiguous()

def leaves_of(*names):
    return [given[n].clone().requires_grad_() for n in names]

for name, function in (("recurrent", naive_recurrent_kda), ("chunk", naive_chunk_kda)):
    leaves = leaves_of("q", "k", "v", "g", "beta", "state")
    o, s = function(*leaves[:5], scale=0.3, initial_state=leaves[5], output_final_state=True)
    keep(name, leaves, [o, s], [given["grad_o"], given["grad_s"]])
leaves = leaves_of("z", "A_log", "dt_bias")
keep("gate", leaves, [naive_kda_gate(leaves[0], leaves[1], leaves[2])], [given["grad_g"]])
leaves = leaves_of("z", "A_log", "dt_bias")
keep("bounded", leaves, [naive_kda_lowerbound_gate(*leaves, lower_bound=-5.0)], [given["grad_g"]])
leaves = leaves_of("query", "weight", "r0", "r1", "r2")
mixed = naive_attnres(leaves[0], leaves[2:], leaves[1], rms_eps=1e-6)
keep("residuals", leaves, [mixed], [given["grad_r"]])
save_file(out, folder / "results.safetensors")
"""


def _inputs() -> dict[str, Tensor]:
    """Two sequences of four chunks of 64 and a state before them; unit vectors as keys."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    b, t, h, k = 2, 256, 3, 16
    unit = torch.nn.functional.normalize
    return {
        "q": unit(drawn(b, t, h, k), dim=-1), "k": unit(drawn(b, t, h, k), dim=-1),
        "v": drawn(b, t, h, k), "g": -torch.rand(b, t, h, k, generator=generator),
        "beta": drawn(b, t, h).sigmoid(), "state": drawn(b, h, k, k),
        "grad_o": drawn(b, t, h, k), "grad_s": drawn(b, h, k, k),
        "z": drawn(b, t, h, k), "A_log": drawn(h), "dt_bias": drawn(h * k),
        "grad_g": drawn(b, t, h, k), "query": drawn(32), "weight": drawn(32) + 1,
        "r0": drawn(5, 7, 32), "r1": drawn(5, 7, 32), "r2": 3 * drawn(5, 7, 32),
        "grad_r": drawn(5, 7, 32),
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fla")


@pytest.fixture
def theirs(need_service: Need, folder: Path) -> dict[str, Tensor]:
    """Returns fla's results and gradients; made once."""
    targets = os.environ.get("FLOPWRIGHT_EXPORT_TARGETS", "")
    python = Path(targets) / "fla" / "bin" / "python"
    how = ". .ci/targets.sh, which sets FLOPWRIGHT_EXPORT_TARGETS"
    need_service("fla", bool(targets) and python.exists(), how)
    if not (folder / "results.safetensors").exists():
        save_file(_inputs(), folder / "inputs.safetensors")
        done = subprocess.run(
            [str(python), "-c", SCRIPT, str(folder)], capture_output=True, text=True, timeout=300,
            cwd=folder, env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
    return load_file(folder / "results.safetensors")


def _equal(
    name: str, theirs: dict[str, Tensor], results: list[Tensor], leaves: list[Tensor],
    grads: list[Tensor],
) -> None:  # fmt: skip
    found = {f"out{i}": t.detach() for i, t in enumerate(results)}
    for i, t in enumerate(torch.autograd.grad(results, leaves, grads)):
        found[f"grad{i}"] = t
    for key, ours in found.items():
        exact = theirs[f"{name}.{key}"]
        error = (ours.view(exact.shape) - exact).abs().max() / exact.abs().max()
        assert error <= BOUND, (name, key, float(error))


def _leaves(*names: str) -> list[Tensor]:
    given = _inputs()
    return [given[n].clone().requires_grad_() for n in names]


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("ours", ["op", "recurrent"])
def test_the_delta_rule(form: str, ours: str, theirs: dict[str, Tensor]) -> None:
    given, leaves = _inputs(), _leaves("q", "k", "v", "g", "beta", "state")
    function = kda if ours == "op" else recurrent
    out, state = function(*leaves[:5], SCALE, leaves[5])
    _equal(form, theirs, [out, state], leaves, [given["grad_o"], given["grad_s"]])


@pytest.mark.parametrize(("name", "bound"), [("gate", 0.0), ("bounded", -5.0)])
def test_both_rules_of_decay(name: str, bound: float, theirs: dict[str, Tensor]) -> None:
    given, leaves = _inputs(), _leaves("z", "A_log", "dt_bias")
    out = kda_gate(leaves[0].flatten(2), leaves[1], leaves[2], bound)
    _equal(name, theirs, [out], leaves, [given["grad_g"].view(out.shape)])


def test_attention_residuals(theirs: dict[str, Tensor]) -> None:
    given, leaves = _inputs(), _leaves("query", "weight", "r0", "r1", "r2")
    out = attn_res(leaves[2:], leaves[0].unsqueeze(0), leaves[1], 1e-6)
    _equal("residuals", theirs, [out], leaves, [given["grad_r"]])
