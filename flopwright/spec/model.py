"""What a model is: the shape of every block, by the field's own names.

Sources of the shapes and counts: the models' technical reports and config files, named in
each catalog file under `source`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

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

MAX_LAYERS: Final = 10_000
# Widths and counts: products of two, times the layers, stay inside 64 bits.
Size = Annotated[int, Field(ge=1, le=2**24)]


class YarnScaling(Spec):
    """YaRN context extension (arXiv 2309.00071).

    cos and sin are multiplied by m(factor, mscale) / m(factor, mscale_all_dim), q.k by
    m(factor, mscale_all_dim)^2, m(f, w) = 0.1 w ln f + 1. DeepSeek's models give both
    weights; with the defaults (1 and 0) it is the form of Llama and Qwen.
    """

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_max_seq_len: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: PositiveFloat = 1.0
    mscale_all_dim: float = 0.0


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


class Rope(Spec):
    """Rotary position embedding."""

    theta: PositiveFloat = 10_000.0
    scaling: RopeScaling | None = None


def _even_for_rope(name: str, width: int) -> None:
    """Refuses an odd width: rotary embedding turns its values in pairs."""
    if width % 2:
        raise ValueError(f"{name} ({width}) must be even for rope; nearest: {width + 1}")


class MlaAttention(Spec):
    """Multi-head latent attention: keys and values come from one low-rank latent."""

    kind: Literal["mla"] = "mla"
    num_heads: Size
    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    rope: Rope = Rope()

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        _even_for_rope("qk_rope_head_dim", self.qk_rope_head_dim)
        return self

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_values_per_token(self) -> int:
        """Values cached a token and layer: the latent and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class GqaAttention(Grown):
    """Grouped-query attention; multi-head where num_kv_heads equals num_heads.

    Attributes:
        bias: whether the query, key and value projections have one (Qwen2).
        o_bias: whether the output projection has one too (GPT-2).
        sliding_window: a query sees itself and the sliding_window - 1 positions before it;
            None: all before it.
        first_window_layer: layers below it see everything (Qwen2's max_window_layers).
    """

    later_fields = ("o_bias", "sliding_window", "first_window_layer")

    kind: Literal["gqa"] = "gqa"
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    qk_norm: bool = False
    bias: bool = False
    o_bias: bool = False
    sliding_window: Size | None = None
    first_window_layer: NonNegativeInt = 0
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
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})"
            )
        return self


Attention = Annotated[MlaAttention | GqaAttention, Field(discriminator="kind")]


class Mlp(Grown):
    """The dense feed-forward block; `bias` is on all of its matrices or on none."""

    later_fields = ("bias",)

    kind: Literal["swiglu", "gelu"] = "swiglu"
    intermediate_size: Size
    bias: bool = False


class Moe(Grown):
    """Mixture of experts: routed SwiGLU experts plus shared ones that see every token.

    Attributes:
        sequence_balance_loss: weight (alpha) of DeepSeek-V3's sequence-wise balance loss.
        router: "sigmoid_noaux_tc" (DeepSeek-V3) scores each expert alone and selects with a
            bias; "softmax" (Qwen3-MoE, Mixtral) scores by a softmax over all experts.
        norm_top_k_prob: the chosen experts' weights are divided by their sum. Always so in
            Mixtral, whose softmax over the chosen logits is the same thing.
    """

    later_fields = ("sequence_balance_loss",)

    num_experts: Size
    top_k: Size
    expert_intermediate_size: Size
    num_shared_experts: int = Field(default=0, ge=0)
    first_dense_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    router: Literal["sigmoid_noaux_tc", "softmax"] = "sigmoid_noaux_tc"
    num_groups: Size = 1
    top_k_groups: Size = 1
    norm_top_k_prob: bool = True
    routed_scaling_factor: PositiveFloat = 1.0
    bias_update_rate: float = Field(default=0.001, ge=0)
    sequence_balance_loss: float = Field(default=0, ge=0)

    @property
    def sparsity(self) -> float:
        """Routed experts over active routed experts."""
        return self.num_experts / self.top_k

    @model_validator(mode="after")
    def _routing(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k ({self.top_k}) must not exceed num_experts ({self.num_experts})"
            )
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups ({self.num_groups}) must divide num_experts ({self.num_experts})"
            )
        return self


class ModelSpec(Grown):
    """A decoder-only transformer.

    Attributes:
        family: naming family of its weights ("deepseek_v3", "llama").
        source: where the numbers come from.
        norm: "rms_norm", or "layer_norm" with weight and bias (GPT-2), for the layers' norms
            and the last one; norms inside attention are RMSNorm.
        positions: "rope" (inside attention) or "learned" (an added table of max_seq_len rows).
        mtp_layers: multi-token-prediction modules behind the last layer (DeepSeek-V3): each a
            layer of the last layer's kind with two norms, a [2 hidden, hidden] projection and
            one more use of the head. The simulator prices them; the executor refuses them.
    """

    later_fields = ("norm", "mtp_layers")

    name: str = Field(min_length=1)
    family: str = "deepseek_v3"
    source: str = ""
    hidden_size: Size
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    vocab_size: Size
    max_seq_len: PositiveInt = 4096
    tied_embeddings: bool = False
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_eps: PositiveFloat = 1e-6
    positions: Literal["rope", "learned"] = "rope"
    attention: Attention
    mlp: Mlp
    moe: Moe | None = None
    mtp_layers: int = Field(default=0, ge=0, le=16)

    @model_validator(mode="after")
    def _layers(self) -> Self:
        if self.moe is not None and self.moe.first_dense_layers > self.num_layers:
            raise ValueError(
                f"moe.first_dense_layers ({self.moe.first_dense_layers}) must not exceed "
                f"num_layers ({self.num_layers})"
            )
        return self

    def is_moe_layer(self, layer: int) -> bool:
        """Returns whether layer `layer` (0-based) has routed experts."""
        return self.moe is not None and layer >= self.moe.first_dense_layers

    def sliding_window(self, layer: int) -> int | None:
        """Returns how many positions a query of this layer sees at most, None for all."""
        attn = self.attention
        if isinstance(attn, GqaAttention) and layer >= attn.first_window_layer:
            return attn.sliding_window
        return None

    def shrunk(self, *, hidden_size: int, num_layers: int, **sizes: Any) -> ModelSpec:
        """Returns a small model of the same family and proportions; see `spec.shrink`."""
        from flopwright.spec.shrink import shrunk  # it needs this module

        return shrunk(self, hidden_size=hidden_size, num_layers=num_layers, **sizes)

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return sum(self.is_moe_layer(i) for i in range(self.num_layers))
