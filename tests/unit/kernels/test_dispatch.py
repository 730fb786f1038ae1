"""Which kernel an op runs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.errors import InputError
from flopwright.kernels import dispatch, libraries
from flopwright.kernels.kda import op as kda_op
from flopwright.kernels.kda import reference as kda_reference
from flopwright.kernels.linear_cross_entropy import op as head_op
from flopwright.kernels.rms_norm import op as norm_op


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.delenv(dispatch.RECORD, raising=False)
    dispatch.measured.cache_clear()
    yield
    dispatch.measured.cache_clear()


def test_a_cpu_and_float64_run_the_reference() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert dispatch.kernel_for("attention", torch.ones(1, dtype=dtype)) == "reference"


def test_the_prior_says_that_it_is_one() -> None:
    for op in ("attention", "grouped_gemm", "rms_norm"):
        assert dispatch.choose(op, "NVIDIA H200").reason.startswith("not measured on a GPU")
    assert dispatch.choose("grouped_gemm", "NVIDIA H200").kernel == "library"


def test_a_measured_choice_holds_for_its_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "choices.json"
    entry = {"kernel": "library", "reason": "1.2 times as fast"}
    file.write_text(json.dumps({"attention": {"Card A": entry}}), encoding="utf-8")
    monkeypatch.setattr(dispatch, "CHOICES", file)
    assert dispatch.choose("attention", "Card A") == dispatch.Choice(**entry)
    assert dispatch.choose("attention", "Card B") == dispatch.PRIOR["attention"]


@pytest.mark.parametrize("inside", [False, True], ids=["kernels", "gpu_check"])
def test_a_benchmarks_result_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inside: bool
) -> None:
    choices = {
        "rms_norm": {"kernel": "library", "reason": "1.3 times as fast"},
        "attention": {"kernel": "triton", "reason": "1.1 times as fast"},
    }
    found: dict[str, Any] = {"card": "Card A", "choices": choices}
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"speed": found} if inside else found), encoding="utf-8")
    monkeypatch.setenv(dispatch.RECORD, str(record))
    monkeypatch.setattr(libraries, "installed", lambda package: True)
    for op, choice in choices.items():
        assert dispatch.choose(op, "Card A") == dispatch.Choice(**choice)
    assert dispatch.choose("attention", "Card B") == dispatch.PRIOR["attention"]
    # Whatever it says of cards, a CPU runs the reference.
    assert dispatch.kernel_for("rms_norm", torch.ones(1)) == "reference"
    # A library that has gone since is not taken, and the reason says so.
    monkeypatch.setattr(libraries, "installed", lambda package: package == "torch")
    gone = dispatch.choose("rms_norm", "Card A")
    assert gone.kernel == "triton"
    assert gone.reason == "liger-kernel is not installed; otherwise: 1.3 times as fast"


def test_a_record_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("[]", encoding="utf-8")
    for path in (file, tmp_path / "absent.json"):
        dispatch.measured.cache_clear()
        monkeypatch.setenv(dispatch.RECORD, str(path))
        with pytest.raises(InputError, match="no result of benchmarks"):
            dispatch.choose("attention", "any")


def test_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "attention=library, reference")
    assert dispatch.choose("attention", "any").kernel == "library"
    assert dispatch.choose("rope", "any").kernel == "reference"
    monkeypatch.setenv(dispatch.VARIABLE, "library")
    assert dispatch.choose("rope", "any").kernel == "triton"  # no library has it
    monkeypatch.setattr(libraries, "installed", lambda package: False)
    monkeypatch.setenv(dispatch.VARIABLE, "kda=library")
    with pytest.raises(InputError, match="flash-linear-attention is not installed"):
        dispatch.choose("kda", "any")
    monkeypatch.setenv(dispatch.VARIABLE, "attention=fast")
    with pytest.raises(InputError, match="fast"):
        dispatch.choose("attention", "any")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("atention=library", "did you mean attention"),
        ("attention=library,norm=triton", "Ops are add_rms_norm, attention"),
        ("=triton,attention=", "'' is none of reference, triton, library"),
    ],
)
def test_a_name_that_no_op_has_is_refused(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, text)
    with pytest.raises(InputError, match=message):
        dispatch.choose("attention", "any")


def test_every_op_that_asks_is_known() -> None:
    folder = Path(dispatch.__file__).parent
    asks = re.compile(r"(?:kernel_for|runs_triton|runs_e4m3)\(\s*\"(\w+)\"")
    asked = {op for file in folder.rglob("*.py") for op in asks.findall(file.read_text("utf-8"))}
    assert asked == set(dispatch.OPS)


@pytest.mark.parametrize(
    ("op", "choice", "message"),
    [
        ("attention", {"kernel": "foo", "reason": "fast"}, "kernel 'foo' is none of reference"),
        ("attention", {"kernel": "triton"}, "attention: no reason for triton"),
        ("attention", "triton", "kernel None is none of"),
        ("rmsnorm", {"kernel": "triton", "reason": "fast"}, "did you mean rms_norm"),
    ],
)
def test_a_record_that_says_what_cannot_be_is_refused(
    op: str, choice: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"card": "A", "choices": {op: choice}}), encoding="utf-8")
    monkeypatch.setenv(dispatch.RECORD, str(record))
    with pytest.raises(InputError, match=message) as raised:
        dispatch.choose("attention", "A")
    assert str(record) in str(raised.value)


# Stand-ins with the libraries' interfaces (liger-kernel 0.8, flash-linear-attention 0.4): how
# our ops call them can be tried without a GPU, their numbers cannot.


class _Loss(torch.autograd.Function):
    """Computes its gradients in the forward pass, as liger-kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        logits = (x @ weight.t()).float()
        if any(ctx.needs_input_grad[:2]):
            d = (logits.softmax(-1) - F.one_hot(targets, weight.shape[0])) / len(targets)
            ctx.save_for_backward(d @ weight, d.t() @ x)
        return F.cross_entropy(logits, targets), None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, Tensor, None]:
        d_x, d_weight = ctx.saved_tensors
        return d_x * grad, d_weight * grad, None


def _norm_forward(
    x: Tensor, w: Tensor, eps: float, offset: float, mode: str, row_mode: bool | None
) -> tuple[Any, ...]:
    assert (offset, mode, row_mode) == (0.0, "gemma", None)
    flat = x.view(-1, x.shape[-1])
    rstd = torch.rsqrt(flat.float().square().mean(-1) + eps)
    y = (flat.float() * rstd.unsqueeze(-1) * w.float()).to(x.dtype)
    return y.view(x.shape), flat, rstd, 1024, 8, 1


def _norm_backward(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, offset: float, mode: int, block: int,
    num_warps: int, in_place: bool, row_mode: bool | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert (mode, block, num_warps, in_place) == (1, 1024, 8, False)
    dy = dy.view(-1, x.shape[-1])
    scaled = x.float() * rstd.unsqueeze(-1)
    g = dy.float() * w.float()
    dx = rstd.unsqueeze(-1) * (g - scaled * (g * scaled).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * scaled).sum(0).to(w.dtype)


def _chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float,
    initial_state: Tensor | None, output_final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert output_final_state
    begin = initial_state
    if begin is None:
        begin = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1])
    return kda_reference.recurrent(q, k, v, g, beta, scale, begin)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts them in the libraries' place; returns the names of the ops that ask for a kernel."""
    made: dict[str, dict[str, Any]] = {
        "liger_kernel.ops.rms_norm": {
            "rms_norm_forward": _norm_forward, "rms_norm_backward": _norm_backward,
            "_str_to_casting_mode": {"llama": 0, "gemma": 1},
        },
        "liger_kernel.ops.utils": {"calculate_settings": lambda width: (1024, 8)},
        "liger_kernel.ops.fused_linear_cross_entropy": {
            "LigerFusedLinearCrossEntropyFunction": _Loss
        },
        "fla.ops.kda": {"chunk_kda": _chunk_kda},
    }  # fmt: skip
    for name, contents in made.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    asked: list[str] = []

    def library(op: str, x: Tensor) -> str:
        asked.append(op)
        return "library"

    for op in (norm_op, head_op, kda_op):
        monkeypatch.setattr(op, "kernel_for", library)
    return asked


def _both(run: Any, inputs: list[Tensor]) -> list[list[Tensor]]:
    """Returns results and gradients of an op."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out) * 0.5)
    return [[out.detach(), *grads]]


def _cases() -> dict[str, tuple[Any, list[Tensor]]]:
    torch.manual_seed(0)
    targets = torch.arange(5)
    q, v = (torch.randn(1, 9, 2, 8) for _ in range(2))
    k = F.normalize(torch.randn(1, 9, 2, 8), dim=-1)
    decay, beta = -torch.rand(1, 9, 2, 8), torch.rand(1, 9, 2)
    return {
        "rms_norm": (
            lambda x, w: norm_op.rms_norm(x, w, 1e-6)[0], [torch.randn(2, 3, 16), torch.randn(16)]
        ),
        "linear_cross_entropy": (
            lambda x, w: head_op.linear_cross_entropy(x, w, targets)[0],
            [torch.randn(5, 8), torch.randn(30, 8)],
        ),
        "kda": (lambda *a: kda_op.kda(*a, 0.3)[0], [q, k, v, decay, beta]),
    }  # fmt: skip


@pytest.mark.parametrize("op", ["rms_norm", "linear_cross_entropy", "kda"])
def test_an_op_that_runs_a_library_gives_the_references_numbers(
    op: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    run, inputs = _cases()[op]
    expected = _both(run, inputs)
    asked = request.getfixturevalue("stand_ins")
    found = _both(run, inputs)
    assert set(asked) == {op}
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
