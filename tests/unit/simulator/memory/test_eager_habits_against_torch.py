"""What plain PyTorch code keeps and allocates, measured, against the habits that profiles name."""

from collections.abc import Callable

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from flopwright.ops import ShardShape
from flopwright.simulator.memory.profile import load_profile
from flopwright.simulator.memory.stack_lives import stack_lives
from flopwright.spec.model import GqaAttention, Mlp, ModelSpec

BATCH, SEQ, HIDDEN, HEADS, KV_HEADS, DIM, WIDTH = 2, 64, 64, 4, 2, 16, 192
SPEC = ModelSpec(
    name="small",
    hidden_size=HIDDEN,
    num_layers=1,
    vocab_size=512,
    norm="layer_norm",
    attention=GqaAttention(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, rope=None),
    mlp=Mlp(intermediate_size=WIDTH),
)


class _Layer(torch.nn.Module):
    """A Llama layer as it is usually written: keys and values repeated, SwiGLU in three ops."""

    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.q, self.o = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.k, self.v = (linear(HIDDEN, KV_HEADS * DIM, bias=False) for _ in range(2))
        self.gate, self.up = (linear(HIDDEN, WIDTH, bias=False) for _ in range(2))
        self.down = linear(WIDTH, HIDDEN, bias=False)
        self.norm1, self.norm2 = (torch.nn.LayerNorm(HIDDEN) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            part(h).view(BATCH, SEQ, -1, DIM).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(out.transpose(1, 2).reshape(BATCH, SEQ, HIDDEN))
        h = self.norm2(x)
        out = self.down(F.silu(self.gate(h)) * self.up(h))
        return torch.add(x, out)


def _kept(module: torch.nn.Module, run: Callable[[], torch.Tensor]) -> int:
    """Bytes of the storages that autograd keeps, each once, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = run()
    assert result is not None
    return sum(seen.values())


def test_an_eager_layer_keeps_the_activated_gate_and_keys_of_every_head() -> None:
    """The projections of keys and values are let go once they are repeated."""
    torch.manual_seed(0)
    layer = _Layer()
    x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    kept = _kept(layer, lambda: layer(x))
    shape = ShardShape(micro_batch_size=BATCH, seq_len=SEQ, dtype="fp32")
    lives = stack_lives(SPEC, 0, shape, load_profile("fsdp2"))
    assert kept == pytest.approx(lives.bytes.sum(), rel=0.03)


def test_cross_entropy_of_widened_logits_holds_fourteen_bytes_each() -> None:
    rows, vocab = 64, 4096
    hidden = torch.randn(rows, 8, dtype=torch.bfloat16)
    head = torch.nn.Linear(8, vocab, bias=False, dtype=torch.bfloat16)
    targets = torch.randint(vocab, (rows,))
    tracker = MemTracker()
    tracker.track_external(head)
    with tracker:
        logits = head(hidden)
        torch.autograd.backward(F.cross_entropy(logits.float(), targets))
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert logits is not None
    for name in ("fsdp2", "torchtitan", "torchtune"):
        wanted = load_profile(name).logit_bytes * rows * vocab
        assert peak == pytest.approx(wanted, rel=0.1)
