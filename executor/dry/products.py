"""Which matrix products a step runs, told from the shapes that operators are given.

Nothing here reads a cost table: shapes are those of the arguments, FLOPs follow from them.
Our own operators stand for the products inside them; every other operator whose name looks
like a product must be known, so that none goes uncounted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from flopwright.report.rank_step import Product

# m, k, n, batch, FLOPs.
_Shape = tuple[int, int, int, int, int]
_CHUNK: Final = 16  # tokens of the delta rule's kernel
_LOOKS_LIKE_A_PRODUCT: Final = ("mm", "matmul", "dot", "conv", "attention", "linear", "einsum")
_DTYPE_NAMES: Final = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float64": "fp64",
    "torch.float16": "fp16",
}


def _product(m: int, k: int, n: int, batch: int = 1) -> _Shape:
    return m, k, n, batch, 2 * m * k * n * batch


def _linear(args: tuple[Any, ...]) -> _Shape:
    x, weight = args[0], args[1]
    n, k = weight.shape
    return _product(x.numel() // k, k, n)


def _mm(args: tuple[Any, ...]) -> _Shape:
    a, b = args[0], args[1]
    return _product(a.shape[0], a.shape[1], b.shape[1])


def _addmm(args: tuple[Any, ...]) -> _Shape:
    return _mm(args[1:])


def _bmm(args: tuple[Any, ...]) -> _Shape:
    a, b = args[0], args[1]
    return _product(a.shape[1], a.shape[2], b.shape[2], a.shape[0])


def _baddbmm(args: tuple[Any, ...]) -> _Shape:
    return _bmm(args[1:])


def _grouped(args: tuple[Any, ...]) -> _Shape:
    x, weight = args[0], args[1]
    experts, n, k = weight.shape
    return _evenly(x.shape[0], experts, k, n)


def _grouped_input(args: tuple[Any, ...]) -> _Shape:
    grad, weight = args[0], args[1]
    experts, n, k = weight.shape
    return _evenly(grad.shape[0], experts, n, k)


def _grouped_weight(args: tuple[Any, ...]) -> _Shape:
    grad, x, counts = args[0], args[1], args[2]
    rows, experts = x.shape[0], counts.shape[0]
    n, k = grad.shape[1], x.shape[1]
    return n, round(rows / experts), k, experts, 2 * rows * n * k


def _evenly(rows: int, experts: int, k: int, n: int) -> _Shape:
    return round(rows / experts), k, n, experts, 2 * rows * k * n


def _attention(args: tuple[Any, ...]) -> _Shape:
    q, _, v, _, *rest = args
    return _causal(q, v, rest[0] if rest else 0, lambda qk, out: qk + out)


def _attention_backward(args: tuple[Any, ...]) -> _Shape:
    _, q, _, v, _, _, _, *rest = args
    return _causal(q, v, rest[0] if rest else 0, lambda qk, out: 3 * qk + 2 * out)


def _causal(q: Tensor, v: Tensor, window: int, widths: Callable[[int, int], int]) -> _Shape:
    batch, seq, heads, qk = q.shape
    seen = min(window, seq) if window else seq
    pairs = batch * heads * (seen * (seen + 1) // 2 + (seq - seen) * seen)
    return seq, qk, seq, batch * heads, 2 * pairs * widths(qk, v.shape[-1])


def _chosen(queries: int, seq: int, top_k: int) -> int:
    """Returns the pairs that queries of whole sequences choose, at most top_k each."""
    w = min(seq, top_k)
    return queries // seq * (w * (w + 1) // 2 + (seq - w) * w)


def _select_keys(args: tuple[Any, ...]) -> _Shape:
    q, k, _, _ = args
    batch, seq, heads, width = q.shape
    flops = batch * seq * (seq + 1) * heads * width
    return batch * seq, width, k.shape[1], heads, flops


def _over_chosen(args: tuple[Any, ...]) -> _Shape:
    q, _, indices, v_width, _ = args
    return _attended(q, indices, q.shape[-1] + v_width)


def _over_chosen_backward(args: tuple[Any, ...]) -> _Shape:
    _, q, _, indices, out, _, _ = args
    return _attended(q, indices, 3 * q.shape[-1] + 2 * out.shape[-1])


def _attended(q: Tensor, indices: Tensor, widths: int) -> _Shape:
    batch, seq, heads, width = q.shape
    pairs = _chosen(batch * seq, seq, indices.shape[-1])
    return batch * seq, width, indices.shape[-1], heads, 2 * pairs * heads * widths


def _index_loss(args: tuple[Any, ...]) -> _Shape:
    index_q, _, _, q, _, _, indices, _ = args
    batch, seq, heads, width = q.shape
    top_k = seq if indices is None else indices.shape[-1]
    own = 3 * index_q.shape[-1] * index_q.shape[-2]
    flops = 2 * _chosen(batch * seq, seq, top_k) * (heads * width + own)
    return batch * seq, width, top_k, heads, flops


def _head_linear(args: tuple[Any, ...]) -> _Shape:
    x, weight = args
    heads, n, k = weight.shape
    return _product(x.shape[0] * x.shape[1], k, n, heads)


def _with_sinks(args: tuple[Any, ...]) -> _Shape:
    q, k, v, _, *rest = args
    return _attention((q, k, v, *rest))


def _delta_rule(args: tuple[Any, ...]) -> _Shape:
    return _chunks(args[0], args[2], state=3, pairs=2, inverse=6, changes=2)


def _delta_rule_backward(args: tuple[Any, ...]) -> _Shape:
    """The states, then each chunk, once more but for results; and the gradients' products."""
    return _chunks(
        args[2], args[4], state=2 + 1 + 6, pairs=2 + 2 + 4, inverse=12, changes=1 + 1 + 4
    )


def _chunks(
    q: Tensor, v: Tensor, *, state: int, pairs: int, inverse: int, changes: int, columns: int = 0
) -> _Shape:
    """Linear attention in chunks of C tokens, keys K and values V wide.

    Args:
        state: products of C x K x V in a chunk; pairs: of C x K x C; inverse: of C x C x C;
            changes: of C x C x V.
        columns: that stand beside the V.
    """
    batch, seq, heads, k = q.shape
    c, w, chunks = _CHUNK, v.shape[-1] + columns, batch * heads * -(-seq // _CHUNK)
    products = state * c * k * w + pairs * c * k * c + inverse * c**3 + changes * c * c * w
    return seq, k, c, batch * heads, 2 * chunks * products


def _summary(args: tuple[Any, ...]) -> _Shape:
    """A run's state from zero, and beside it the product of its transitions, K columns more."""
    k, v = args[0], args[1]
    return _chunks(k, v, columns=k.shape[-1], state=2, pairs=2, inverse=6, changes=1)


def _state_gradient(args: tuple[Any, ...]) -> _Shape:
    return _chunks(args[2], args[0], state=3, pairs=2, inverse=6, changes=2)


def _carried(args: tuple[Any, ...]) -> _Shape:
    """From run to run: what no run was before is added, and what none follows is not made."""
    batch, heads, k, columns = args[0][0].shape
    v, links = columns - k, len(args[0]) - 2
    return k, k, v, batch * heads, 2 * links * batch * heads * k * k * v


def _head_and_loss_backward(args: tuple[Any, ...]) -> _Shape:
    m, k, n, batch, flops = _linear(args[1:])
    return m, k, n, batch, 3 * flops  # the logits once more, and both gradients


_READERS: Final[dict[str, tuple[str, Callable[[tuple[Any, ...]], _Shape]]]] = {
    "flopwright::linear": ("gemm", _linear),
    "flopwright::linear_cross_entropy": ("gemm", _linear),
    "flopwright::linear_cross_entropy_backward": ("gemm", _head_and_loss_backward),
    "flopwright::linear_cross_entropy_terms": ("gemm", _linear),
    "flopwright::linear_cross_entropy_part_backward": ("gemm", _head_and_loss_backward),
    "aten::mm": ("gemm", _mm),
    "aten::addmm": ("gemm", _addmm),
    "aten::addmm_": ("gemm", _addmm),
    "aten::bmm": ("gemm", _bmm),
    "aten::baddbmm": ("gemm", _baddbmm),
    "flopwright::grouped_gemm": ("grouped_gemm", _grouped),
    "flopwright::grouped_gemm_input_gradient": ("grouped_gemm", _grouped_input),
    "flopwright::grouped_gemm_weight_gradient": ("grouped_gemm", _grouped_weight),
    "flopwright::attention": ("attention", _attention),
    "flopwright::attention_backward": ("attention", _attention_backward),
    "flopwright::attention_with_sinks": ("attention", _with_sinks),
    "flopwright::select_keys": ("attention", _select_keys),
    "flopwright::selected_attention": ("attention", _over_chosen),
    "flopwright::selected_attention_backward": ("attention", _over_chosen_backward),
    "flopwright::index_loss": ("attention", _index_loss),
    "flopwright::head_linear": ("gemm", _head_linear),
    "flopwright::kda": ("attention", _delta_rule),
    "flopwright::kda_backward": ("attention", _delta_rule_backward),
    "flopwright::kda_summary": ("attention", _summary),
    "flopwright::kda_state_gradient": ("attention", _state_gradient),
    "flopwright::kda_carried": ("attention", _carried),
}


# Named like a product, but priced by the bytes it moves.
_BYTES: Final = frozenset({"flopwright::short_conv", "flopwright::short_conv_backward"})

# Where the narrow operands of those stand that take or return sums in fp32, or positions.
_OPERAND: Final = {
    "flopwright::select_keys": 0,
    "flopwright::linear_cross_entropy_backward": 1,
    "flopwright::linear_cross_entropy_terms": 0,
    "flopwright::linear_cross_entropy_part_backward": 1,
    "flopwright::kda_summary": 0,
    "flopwright::kda_state_gradient": 0,
}


def reader_of(name: str) -> Callable[[tuple[Any, ...], Any, str], tuple[Product, int]] | None:
    """Returns what reads (product, FLOPs) off a call of that operator; None where it has none.

    Raises:
        NotImplementedError: its name looks like a product that this file does not know.
    """
    if name in _READERS:
        kernel, shape = _READERS[name]

        def read(args: tuple[Any, ...], out: Any, action: str) -> tuple[Product, int]:
            m, k, n, batch, flops = shape(args)
            place = _OPERAND.get(name)
            dtype = _dtype(args, out) if place is None else _dtype(args[place:], None)
            return Product(action, kernel, dtype, m, k, n, batch), flops

        return read
    if name in _BYTES:
        return None
    short = name.split("::")[-1]
    if any(word in short for word in _LOOKS_LIKE_A_PRODUCT) and not short.startswith("comm"):
        raise NotImplementedError(f"the dry run does not know the FLOPs of {name}")
    return None


def _dtype(args: tuple[Any, ...], out: Any) -> str:
    result = out if isinstance(out, Tensor) else args[0]
    return _DTYPE_NAMES.get(str(result.dtype), str(result.dtype))
