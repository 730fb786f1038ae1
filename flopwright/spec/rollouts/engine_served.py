"""What is served: a model as an engine holds it, its layout on GPUs, and the engine's habits.

A served model is given by its layers, so that models whose layers differ (sliding windows in
every other one, linear attention in three of four) are as easy to say as uniform ones. Weights
and caches have the formats of the release.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from flopwright.spec.base import Spec
from flopwright.spec.formats import BF16, BLOCK_FP8, INT4_G32, MXFP4, NVFP4, WeightFormat
from flopwright.spec.model import (
    Attention,
    GqaAttention,
    MlaAttention,
    Mlp,
    ModelSpec,
    Moe,
    Size,
)
from flopwright.spec.model import KdaAttention as KdaAttention
from flopwright.units import Bytes, Seconds

FP8_TENSOR: Final = WeightFormat(
    name="fp8",
    bits=8,
    roles=BLOCK_FP8.roles,
    source="E4M3 with one scale a tensor or row, whose bytes are not counted",
)
WEIGHT_FORMATS: Final = {f.name: f for f in (BF16, FP8_TENSOR, BLOCK_FP8, INT4_G32, MXFP4, NVFP4)}
FormatName = Literal["bf16", "fp8", "block_fp8", "int4_g32", "mxfp4", "nvfp4"]
ServedRole = Literal["attention", "mlp", "expert", "shared_expert", "embedding", "head"]
CacheType = Literal["bf16", "fp8"]
CACHE_BYTES: Final[dict[str, int]] = {"bf16": 2, "fp8": 1, "fp32": 4}


ServedAttention = Annotated[
    MlaAttention | GqaAttention | KdaAttention, Field(discriminator="kind")
]


class ServedLayers(Spec):
    """Layers that are alike; a dense one has `mlp`, one with routed experts `moe`.

    Attributes:
        output_gate: attention's output is multiplied by a gate of its own full matrix.
        latent_size: routed experts work in this width, between a projection down and one up.
    """

    count: PositiveInt
    attention: ServedAttention
    mlp: Mlp | None = None
    moe: Moe | None = None
    output_gate: bool = False
    latent_size: Size | None = None

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.mlp is None) == (self.moe is None):
            raise ValueError("a layer has either mlp or moe")
        if self.latent_size is not None and self.moe is None:
            raise ValueError("latent_size goes with moe")
        return self

    @property
    def window(self) -> int | None:
        """Positions a query sees at most, None of all."""
        attn = self.attention
        return attn.sliding_window if isinstance(attn, GqaAttention) else None


class ServedModel(Spec):
    """A model in its release format.

    Attributes:
        layers: groups of alike layers, in any order.
        formats: weight format by role; a role not named is bf16.
        kv_dtype: of the cache; state_dtype: of recurrent states.
        other_params: weights outside of the matrices counted here (norms, biases, a vision
            tower), in bf16.
        max_context: tokens a sequence may have.
        sources: where numbers come from.
    """

    name: str = Field(min_length=1)
    hidden_size: Size
    vocab_size: Size
    tied_embeddings: bool = False
    layers: tuple[ServedLayers, ...] = Field(min_length=1)
    formats: dict[ServedRole, FormatName] = Field(default_factory=dict)
    kv_dtype: CacheType = "bf16"
    state_dtype: Literal["bf16", "fp32"] = "fp32"
    other_params: NonNegativeInt = 0
    max_context: PositiveInt = 131_072
    sources: dict[str, str] = Field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(group.count for group in self.layers)

    def format_of(self, role: ServedRole) -> WeightFormat:
        """Returns the weight format of a role."""
        return WEIGHT_FORMATS[self.formats.get(role, "bf16")]

    def weights_text(self) -> str:
        """Returns which roles are in which format, e.g. "expert int4_g32, others bf16"."""
        named = [f"{role} {name}" for role, name in sorted(self.formats.items()) if name != "bf16"]
        return ", ".join([*named, "others bf16"]) if named else "all bf16"

    def in_format(self, release: FormatName, kv_dtype: CacheType | None = None) -> ServedModel:
        """Returns the model with its matrices in another release format, other roles bf16.

        Formats whose releases keep routed experts only take all matrices of the blocks of a
        model that has none, as AWQ and GPTQ releases of dense models do.
        """
        roles: frozenset[str] = WEIGHT_FORMATS[release].roles
        if roles == {"expert"} and all(group.moe is None for group in self.layers):
            roles = BLOCK_FP8.roles - {"expert", "shared_expert"}
        formats = dict.fromkeys(sorted(roles), release)
        changed = {"formats": formats, "kv_dtype": kv_dtype or self.kv_dtype}
        return self.model_validate({**self.to_data(), **changed})


class EngineShape(Spec):
    """How one instance lies on its GPUs: tp * dp of them.

    Attributes:
        tp: GPUs that share the heads of one sequence.
        dp: groups of tp GPUs with sequences of their own (data-parallel attention).
        ep: groups of GPUs among which the experts are dealt; the GPUs of a group share the
            width of its experts.
        redundant_experts: copies of busy experts beyond the model's own.
    """

    tp: Annotated[PositiveInt, Field(le=1024)] = 1
    dp: Annotated[PositiveInt, Field(le=4096)] = 1
    ep: Annotated[PositiveInt, Field(le=4096)] = 1
    redundant_experts: NonNegativeInt = 0

    @property
    def gpus(self) -> int:
        """GPUs of the instance."""
        return self.tp * self.dp

    @property
    def expert_tp(self) -> int:
        """GPUs that share the width of one expert."""
        return self.gpus // self.ep

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.gpus % self.ep:
            raise ValueError(f"ep ({self.ep}) must divide the GPUs (tp * dp = {self.gpus})")
        if self.dp > 1 and self.ep != self.gpus:
            raise ValueError(
                f"with dp above 1 every GPU has experts of its own: ep must be {self.gpus}"
            )
        return self


class EngineSoftware(Spec):
    """What an engine does that its hardware does not decide. Files say where each comes from.

    Attributes:
        graph_batches: batches for which a decode step is captured, padded up to the next one;
            empty: none is.
        memory_share: "of_free": cache takes `memory_fraction` of what weights and workspace
            leave; "of_total": weights, workspace and cache together take it of the GPU.
        workspace_bytes: activations, graphs and communication buffers of a GPU.
        block_tokens: tokens of one block of cache.
        keeps_windows: layers with a window keep the whole context all the same.
        admission: "whole": an attempt starts when its whole length fits; "on_demand": when
            its prompt does, and attempts are preempted when the cache is full.
        max_step_tokens: tokens of one step, prefill and decode together, of a tp group.
        max_running: attempts of a tp group at most.
        step_host_s: host seconds of a step that the GPU waits for.
        attempt_host_s: and for every attempt of a tp group.
        logit_bytes: bytes that choosing a token (and its log-probability) moves for every
            entry of the vocabulary.
        decode_share: bandwidth that its decode attention reaches as a share of the tables';
            latent_decode_share: the same of latent attention.
        decode_tile_rows: queries that its decode attention computes for every cached head,
            those of the head padded to so many.
        exchange: how tokens reach experts of other GPUs: "gather_scatter" gathers all of them
            everywhere, "deepep" sends each token to its experts, by low-latency kernels in
            decoding and once to each node in prefill.
        two_batches: the step is cut in two halves, so that one computes while the other's
            tokens travel; hidden_share is the share of the shorter side that this hides.
        expert_load_cv: spread of the experts' popularity (standard deviation over mean).
        balanced_experts: redundant experts and placement follow the load.
        fp8_cache_share: bandwidth that decode attention reaches on an fp8 cache as a share of
            that on a bf16 one; None: as the tables have it.
        fitted: fields that were fitted on published rows, with the ids of the rows.
    """

    name: str = Field(min_length=1)
    graph_batches: tuple[PositiveInt, ...] = ()
    memory_share: Literal["of_free", "of_total"] = "of_total"
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    workspace_bytes: Bytes = Field(default=4 * 2**30, alias="workspace")
    block_tokens: PositiveInt = 32
    keeps_windows: bool = False
    admission: Literal["whole", "on_demand"] = "on_demand"
    max_step_tokens: PositiveInt = 8192
    max_running: PositiveInt = 1024
    step_host_s: Seconds = Field(default=0.0, alias="step_host")
    attempt_host_s: Seconds = Field(default=0.0, alias="attempt_host")
    logit_bytes: PositiveFloat = 8.0
    decode_share: float = Field(default=1.0, gt=0, le=2)
    latent_decode_share: float = Field(default=1.0, gt=0, le=2)
    decode_tile_rows: PositiveInt = 1
    exchange: Literal["gather_scatter", "deepep"] = "gather_scatter"
    two_batches: bool = False
    hidden_share: float = Field(default=0.0, ge=0, le=1)
    expert_load_cv: float = Field(default=0.0, ge=0, le=10)
    balanced_experts: bool = False
    fp8_cache_share: float | None = Field(default=None, gt=0, le=2)
    fitted: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)


def served_model(
    spec: ModelSpec, release: FormatName = "bf16", kv_dtype: CacheType = "bf16"
) -> ServedModel:
    """Returns a model of the catalog as an engine holds it.

    Args:
        release: format of the matrices that such releases quantise; the rest is bf16.
        kv_dtype: of the cache.
    """
    groups: list[list[int]] = []
    for layer in range(spec.num_layers):
        alike = groups and _kind_of(spec, groups[-1][0]) == _kind_of(spec, layer)
        if alike:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    layers = tuple(_layers(spec, group[0], len(group)) for group in groups)
    bare = ServedModel(
        name=spec.name,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        tied_embeddings=spec.tied_embeddings,
        layers=layers,
        max_context=spec.max_seq_len,
        sources={"all": spec.source} if spec.source else {},
    )
    return bare.in_format(release, kv_dtype)


def _kind_of(spec: ModelSpec, layer: int) -> tuple[bool, int | None, str]:
    return spec.is_moe_layer(layer), spec.sliding_window(layer), spec.attention_of(layer).kind


def _layers(spec: ModelSpec, layer: int, count: int) -> ServedLayers:
    attn: Attention | KdaAttention = spec.attention_of(layer)
    gated = isinstance(attn, MlaAttention) and attn.output_gate
    if gated:  # here a gate belongs to the layers
        attn = attn.model_copy(update={"output_gate": False})
    if isinstance(attn, GqaAttention) and spec.sliding_window(layer) is None:
        attn = attn.model_copy(update={"sliding_window": None})
    moe = spec.moe if spec.is_moe_layer(layer) else None
    return ServedLayers(
        count=count,
        attention=attn,
        moe=None if moe is None else moe.model_copy(update={"latent_size": None}),
        mlp=None if moe is not None else spec.mlp,
        output_gate=gated,
        latent_size=None if moe is None else moe.latent_size,
    )
