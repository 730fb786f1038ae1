"""What a model is: the shape of every block, by the field's own names.

Sources of the shapes and counts: the models' technical reports and config files, named in
each catalog file under `source`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from flopwright.spec.base import Spec


class YarnScaling(Spec):
    """YaRN context extension (arXiv 2309.00071) in the DeepSeek form."""

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_max_seq_len: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: PositiveFloat = 1.0
    mscale_all_dim: float = 0.0


class Rope(Spec):
    """Rotary position embedding."""

    theta: PositiveFloat = 10_000.0
    scaling: YarnScaling | None = None


class MlaAttention(Spec):
    """Multi-head latent attention: keys and values come from one low-rank latent."""

    kind: Literal["mla"] = "mla"
    num_heads: PositiveInt
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    rope: Rope = Rope()

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_values_per_token(self) -> int:
        """Values cached a token and layer: the latent and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class GqaAttention(Spec):
    """Grouped-query attention; multi-head where num_kv_heads equals num_heads."""

    kind: Literal["gqa"] = "gqa"
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    qk_norm: bool = False
    bias: bool = False
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
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})"
            )
        return self


Attention = Annotated[MlaAttention | GqaAttention, Field(discriminator="kind")]


class Mlp(Spec):
    """The dense feed-forward block."""

    kind: Literal["swiglu", "gelu"] = "swiglu"
    intermediate_size: PositiveInt


class Moe(Spec):
    """Mixture of experts: routed SwiGLU experts plus shared ones that see every token."""

    num_experts: PositiveInt
    top_k: PositiveInt
    expert_intermediate_size: PositiveInt
    num_shared_experts: int = Field(default=0, ge=0)
    first_dense_layers: int = Field(default=0, ge=0)
    router: Literal["sigmoid_noaux_tc", "softmax"] = "sigmoid_noaux_tc"
    num_groups: PositiveInt = 1
    top_k_groups: PositiveInt = 1
    norm_top_k_prob: bool = True
    routed_scaling_factor: PositiveFloat = 1.0
    bias_update_rate: float = Field(default=0.001, ge=0)

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


class ModelSpec(Spec):
    """A decoder-only transformer.

    Attributes:
        family: naming family of its weights ("deepseek_v3", "llama").
        source: where the numbers come from.
        positions: "rope" (inside attention) or "learned" (an added table of max_seq_len rows).
    """

    name: str = Field(min_length=1)
    family: str = "deepseek_v3"
    source: str = ""
    hidden_size: PositiveInt
    num_layers: PositiveInt
    vocab_size: PositiveInt
    max_seq_len: PositiveInt = 4096
    tied_embeddings: bool = False
    norm_eps: PositiveFloat = 1e-6
    positions: Literal["rope", "learned"] = "rope"
    attention: Attention
    mlp: Mlp
    moe: Moe | None = None

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

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return sum(self.is_moe_layer(i) for i in range(self.num_layers))
