"""A model's attention blocks: rotary positions, latent, grouped-query, linear attention."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from flopwright.spec.base import Grown, Spec

# Widths and counts: products of two, times the layers, stay inside 64 bits.
Size = Annotated[int, Field(ge=1, le=2**24)]


class YarnScaling(Grown):
    """YaRN context extension (arXiv 2309.00071).

    cos and sin are multiplied by m(factor, mscale) / m(factor, mscale_all_dim), q.k by
    m(factor, mscale_all_dim)^2, m(f, w) = 0.1 w ln f + 1. DeepSeek's models give both
    weights; with the defaults (1 and 0) it is the form of Llama and Qwen.

    Attributes:
        truncate: the range of pairs between slow and fast ends at whole ones (not in gpt-oss).
    """

    later_fields = ("truncate",)

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_max_seq_len: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: PositiveFloat = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


class LinearScaling(Spec):
    """Positions divided by `factor` (arXiv 2306.15595)."""

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat


class Llama3Scaling(Spec):
    """Llama 3.1's context extension: slow pairs are divided by `factor`, fast ones kept.

    A pair that turns less than low_freq_factor times over the original context is slow, one
    that turns more than high_freq_factor times is fast; between them the change is linear
    (arXiv 2407.21783 and the released code).
    """

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    original_max_seq_len: PositiveInt
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor "
                f"({self.high_freq_factor})"
            )
        return self


def _scaling_kind(value: Any) -> str:
    """Returns the kind of a scaling; a file that names none means YaRN."""
    kind = value.get("kind", "yarn") if isinstance(value, dict) else getattr(value, "kind", "")
    return str(kind)


RopeScaling = Annotated[
    Annotated[YarnScaling, Tag("yarn")]
    | Annotated[LinearScaling, Tag("linear")]
    | Annotated[Llama3Scaling, Tag("llama3")],
    Discriminator(_scaling_kind),
]


class Rope(Grown):
    """Rotary position embedding.

    Attributes:
        fraction: share of a head's width that is turned, its first columns (GLM-4.5: a half).
    """

    later_fields = ("fraction",)

    theta: PositiveFloat = 10_000.0
    scaling: RopeScaling | None = None
    fraction: float = Field(default=1.0, gt=0, le=1)

    def width(self, head_dim: int) -> int:
        """Returns how many columns of a head are turned."""
        return int(head_dim * self.fraction)


def _even_for_rope(name: str, width: int) -> None:
    """Refuses an odd width: rotary embedding turns its values in pairs."""
    if width % 2:
        raise ValueError(f"{name} ({width}) must be even for rope; nearest: {width + 1}")


class Indexer(Spec):
    """What chooses the positions that a query attends to (sparse attention of DeepSeek-V3.2).

    A position s scores sum over heads of w_h relu(q_h . k_s) with a query; the top_k that score
    most, of those up to the query's own, are attended to. Queries come from attention's latent
    query, keys (one for all heads) and weights from the state.

    Attributes:
        loss_weight: of the divergence between its scores and what attention gives the chosen
            positions, by which alone it learns; nothing else of the model feels that loss.
    """

    num_heads: Size
    head_dim: Size
    top_k: Size
    loss_weight: PositiveFloat = 1.0


class MlaAttention(Grown):
    """Multi-head latent attention: keys and values come from one low-rank latent.

    Attributes:
        indexer: chooses the positions that a query attends to; None: all before it.
        rope: None leaves the "rotary" columns unturned: keys know no positions (Kimi Linear).
        output_gate: each value is multiplied by a sigmoid of the state (one full matrix)
            before the output projection (Kimi K3).
        latent_norm_eps: epsilon of the latents' norms; None: the model's norm_eps.
    """

    later_fields = ("output_gate", "latent_norm_eps", "indexer")

    kind: Literal["mla"] = "mla"
    num_heads: Size
    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    rope: Rope | None = Rope()
    output_gate: bool = False
    latent_norm_eps: PositiveFloat | None = None
    indexer: Indexer | None = None

    @model_validator(mode="after")
    def _index(self) -> Self:
        index = self.indexer
        if index is None:
            return self
        wrong = []
        if self.q_lora_rank is None:
            wrong.append("indexer goes with q_lora_rank: its queries come from that latent")
        if index.head_dim < self.qk_rope_head_dim:
            wrong.append(
                f"indexer.head_dim ({index.head_dim}) must be at least qk_rope_head_dim "
                f"({self.qk_rope_head_dim}), which its first columns turn by"
            )
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        _even_for_rope("qk_rope_head_dim", self.qk_rope_head_dim)
        if self.rope is not None and self.rope.fraction != 1:
            raise ValueError("rope.fraction: latent attention turns all of qk_rope_head_dim")
        return self

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_values_per_token(self) -> int:
        """Values cached a token and layer: the latent, the shared rotary key, the index key."""
        index = 0 if self.indexer is None else self.indexer.head_dim
        return self.kv_lora_rank + self.qk_rope_head_dim + index


class GqaAttention(Grown):
    """Grouped-query attention; multi-head where num_kv_heads equals num_heads.

    Attributes:
        bias: whether the query, key and value projections have one (Qwen2).
        o_bias: whether the output projection has one too (GPT-2).
        sliding_window: a query sees itself and the sliding_window - 1 positions before it;
            None: all before it.
        first_window_layer: layers below it see everything (Qwen2's max_window_layers).
        full_every: under a window every so many layers, from the first one on, the last of them
            sees everything (gpt-oss: 2).
        sinks: one learned logit a head with no value behind it (gpt-oss).
        qk_norm_whole: qk_norm is over all heads together (MiniMax-M2), not head by head.
    """

    later_fields = (
        "o_bias",
        "sliding_window",
        "first_window_layer",
        "full_every",
        "sinks",
        "qk_norm_whole",
    )

    kind: Literal["gqa"] = "gqa"
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    qk_norm: bool = False
    bias: bool = False
    o_bias: bool = False
    sliding_window: Size | None = None
    first_window_layer: NonNegativeInt = 0
    full_every: Size | None = None
    sinks: bool = False
    qk_norm_whole: bool = False
    rope: Rope | None = Rope()

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key."""
        return self.head_dim

    @property
    def v_head_dim(self) -> int:
        """Width of one head's value."""
        return self.head_dim

    @property
    def cache_values_per_token(self) -> int:
        """Values cached a token and layer: keys and values of every KV head."""
        return 2 * self.num_kv_heads * self.head_dim

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.rope is not None:
            _even_for_rope("head_dim", self.head_dim)
            turned = self.head_dim * self.rope.fraction
            if turned != int(turned) or turned % 2:
                raise ValueError(
                    f"rope.fraction ({self.rope.fraction:g}) must leave an even number of "
                    f"columns of head_dim ({self.head_dim})"
                )
        if self.qk_norm_whole and not self.qk_norm:
            raise ValueError("qk_norm_whole goes with qk_norm")
        if self.full_every is not None and self.sliding_window is None:
            raise ValueError("full_every goes with a sliding_window")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})"
            )
        return self


class KdaAttention(Grown):
    """Kimi delta attention: a state of head_dim x head_dim a head instead of a growing cache.

    Queries, keys and values pass a short causal convolution a channel; the state decays by
    channel (arXiv 2510.26692).

    Attributes:
        gate_rank: inner width of the decay's two matrices; None: head_dim.
        output_gate_rank: that of the output gate; None: one full matrix.
        decay_lower_bound: log-decays are lower_bound * sigmoid(e^A z) (Kimi K3: -5); None:
            -e^A * softplus(z) (Kimi Linear).
    """

    later_fields = ("decay_lower_bound",)

    kind: Literal["kda"] = "kda"
    num_heads: Size
    head_dim: Size
    conv_kernel: PositiveInt = 4
    gate_rank: Size | None = None
    output_gate_rank: Size | None = None
    decay_lower_bound: float | None = Field(default=None, lt=0, ge=-5)

    @property
    def inner_size(self) -> int:
        """Width of all heads' queries, keys or values together."""
        return self.num_heads * self.head_dim

    @property
    def decay_rank(self) -> int:
        """Inner width of the decay's two matrices."""
        return self.gate_rank or self.head_dim

    @property
    def state_values(self) -> int:
        """Values of one sequence's state in one layer."""
        return self.num_heads * self.head_dim**2

    @property
    def conv_values(self) -> int:
        """Values that the short convolutions of q, k and v keep of one sequence."""
        return 3 * self.inner_size * (self.conv_kernel - 1)


Attention = Annotated[MlaAttention | GqaAttention, Field(discriminator="kind")]
