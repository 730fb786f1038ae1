"""What a model is: the shape of every block, by the field's own names.

Sources of the shapes and counts: the models' technical reports and config files, named in
each catalog file under `source`. Attention blocks are in `spec.attention`.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from flopwright.spec.attention import Attention as Attention
from flopwright.spec.attention import GqaAttention as GqaAttention
from flopwright.spec.attention import Indexer as Indexer
from flopwright.spec.attention import KdaAttention as KdaAttention
from flopwright.spec.attention import LinearScaling as LinearScaling
from flopwright.spec.attention import Llama3Scaling as Llama3Scaling
from flopwright.spec.attention import MlaAttention as MlaAttention
from flopwright.spec.attention import Rope as Rope
from flopwright.spec.attention import RopeScaling as RopeScaling
from flopwright.spec.attention import Size as Size
from flopwright.spec.attention import YarnScaling as YarnScaling
from flopwright.spec.base import Grown
from flopwright.spec.vision import VisionTower

MAX_LAYERS: Final = 10_000


class Mlp(Grown):
    """The dense feed-forward block; `bias` is on all of its matrices or on none.

    Attributes:
        kind: "relu2" is the square of relu (Nemotron-4), "situ_glu" is
            gate_bound tanh(g / gate_bound) sigmoid(g) times up_bound tanh(u / up_bound)
            (Kimi K3); experts have the same activation. "clamped_glu" is gpt-oss's, of experts
            alone: (u + 1) g sigmoid(1.702 g) of g at most and u within limit.
    """

    later_fields = ("bias", "gate_bound", "up_bound", "limit")

    kind: Literal["swiglu", "gelu", "relu2", "situ_glu", "clamped_glu"] = "swiglu"
    intermediate_size: Size
    bias: bool = False
    gate_bound: PositiveFloat | None = None
    up_bound: PositiveFloat | None = None
    limit: PositiveFloat | None = None

    @property
    def gated(self) -> bool:
        """Whether two matrices lead in: a gate and what it gates."""
        return self.kind not in {"gelu", "relu2"}

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds of SiTU-GLU's two factors, None of other activations."""
        if self.gate_bound is None or self.up_bound is None:
            return None
        return self.gate_bound, self.up_bound

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if (self.kind == "situ_glu") != (self.bounds is not None):
            raise ValueError("gate_bound and up_bound go with kind situ_glu, both of them")
        if (self.kind == "clamped_glu") != (self.limit is not None):
            raise ValueError("limit goes with kind clamped_glu")
        return self


class Moe(Grown):
    """Mixture of experts: routed gated experts plus shared ones that see every token.

    Attributes:
        sequence_balance_loss: weight (alpha) of DeepSeek-V3's sequence-wise balance loss.
        router: "sigmoid_noaux_tc" (DeepSeek-V3) scores each expert alone and selects with a
            bias; "softmax" (Qwen3-MoE, Mixtral) scores by a softmax over all experts.
        norm_top_k_prob: the chosen experts' weights are divided by their sum. Always so in
            Mixtral, whose softmax over the chosen logits is the same thing.
        latent_size: routed experts work in this width, between a projection down and, behind
            a norm of their sum, one up (LatentMoE, Kimi K3).
        balance: how the selection bias follows the loads: "sign" moves it by
            bias_update_rate, "quantile" sets it from the quantiles of the scores (Kimi K3).
        bias: of the router and of the routed experts' matrices (gpt-oss).
    """

    later_fields = ("sequence_balance_loss", "latent_size", "balance", "bias")

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
    latent_size: Size | None = None
    balance: Literal["sign", "quantile"] = "sign"
    bias: bool = False

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
        if self.balance == "quantile" and (
            self.router != "sigmoid_noaux_tc" or self.num_groups > 1
        ):
            raise ValueError("balance quantile goes with router sigmoid_noaux_tc without groups")
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
            layer of the last layer's kind with three norms, a [2 hidden, hidden] projection
            and one more use of the head. The executor trains them where nothing is cut.
        mtp_loss_weight: of the mean of their losses beside the model's own.
        linear_attention: what layers outside of full_attention_layers attend with.
        full_attention_layers: 0-based layers with `attention`; goes with linear_attention.
        attn_res_block: layers a block of attention residuals (Kimi K3): what a sub-layer reads
            is a learned mixture of the embedding, the sums of the blocks before and the
            running sum of its own, in place of the sum of everything before it.
        vision: the tower that makes tokens of images. No number of the text model has it in:
            `explain` and models/vision price it beside them, and nothing trains it.
    """

    later_fields = (
        "norm", "mtp_layers", "mtp_loss_weight", "linear_attention", "full_attention_layers",
        "attn_res_block", "vision",
    )  # fmt: skip

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
    mtp_loss_weight: float = Field(default=0.3, ge=0)
    linear_attention: KdaAttention | None = None
    full_attention_layers: tuple[NonNegativeInt, ...] | None = None
    attn_res_block: Size | None = None
    vision: VisionTower | None = None

    @model_validator(mode="after")
    def _layers(self) -> Self:
        if self.moe is not None and self.moe.first_dense_layers > self.num_layers:
            raise ValueError(
                f"moe.first_dense_layers ({self.moe.first_dense_layers}) must not exceed "
                f"num_layers ({self.num_layers})"
            )
        full = self.full_attention_layers
        if (full is None) != (self.linear_attention is None):
            raise ValueError("linear_attention and full_attention_layers go together")
        if full is not None and (
            not full or list(full) != sorted(set(full)) or full[-1] >= self.num_layers
        ):
            raise ValueError(
                f"full_attention_layers must be ascending, below num_layers ({self.num_layers}) "
                "and at least one"
            )
        shared = self.moe is not None and self.moe.num_shared_experts > 0
        if self.mlp.kind == "clamped_glu" and (shared or not self.is_moe_layer(0)):
            raise ValueError("mlp.kind clamped_glu is of routed experts alone, in every layer")
        if self.attn_res_block is not None and self.mtp_layers:
            raise ValueError("mtp_layers does not go with attn_res_block")
        if self.positions == "learned" and self.mtp_layers:
            raise ValueError("mtp_layers goes with rotary positions, not with a learned table")
        return self

    def is_moe_layer(self, layer: int) -> bool:
        """Returns whether layer `layer` (0-based) has routed experts."""
        return self.moe is not None and layer >= self.moe.first_dense_layers

    def attention_of(self, layer: int) -> Attention | KdaAttention:
        """Returns what layer `layer` attends with; prediction modules have full attention."""
        full = self.full_attention_layers
        if self.linear_attention is None or full is None or layer >= self.num_layers:
            return self.attention
        return self.attention if layer in full else self.linear_attention

    @property
    def common_heads(self) -> int:
        """Largest number of ranks that both kinds of attention can give whole heads."""
        linear = self.linear_attention
        own = self.attention.num_heads
        return own if linear is None else math.gcd(own, linear.num_heads)

    @property
    def num_full_attention_layers(self) -> int:
        """Layers whose attention keeps a growing cache."""
        full = self.full_attention_layers
        return self.num_layers if full is None else len(full)

    def begins_block(self, layer: int) -> bool:
        """Returns whether attention residuals begin a new block at this layer."""
        return self.attn_res_block is not None and layer % self.attn_res_block == 0

    def residual_sources(self, layer: int) -> tuple[int, int]:
        """Returns how many sources the mixtures before attention and feed-forward of a layer have.

        (1, 1) without attention residuals. At num_layers the first is the output's.
        """
        if self.attn_res_block is None:
            return 1, 1
        finished = -(-layer // self.attn_res_block)  # blocks begun by the layers before
        first = finished + 1
        return first, first + self.begins_block(layer)

    def sliding_window(self, layer: int) -> int | None:
        """Returns how many positions a query of this layer sees at most, None for all."""
        attn = self.attention_of(layer)
        if not isinstance(attn, GqaAttention) or layer < attn.first_window_layer:
            return None
        whole = attn.full_every is not None and (layer + 1) % attn.full_every == 0
        return None if whole else attn.sliding_window

    def shrunk(self, *, hidden_size: int, num_layers: int, **sizes: Any) -> ModelSpec:
        """Returns a small model of the same family and proportions; see `spec.shrink`."""
        from flopwright.spec.shrink import shrunk  # it needs this module

        return shrunk(self, hidden_size=hidden_size, num_layers=num_layers, **sizes)

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return sum(self.is_moe_layer(i) for i in range(self.num_layers))
