"""What a software stack allocates: the choices of a framework that decide its memory.

Each field is a buffer or a width that the framework's code allocates, told in its file's
`source`; none is fitted to a measured run. The neutral profile is our own executor's:
stages.py prices that one by the tables of models/, exactly.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

import flopwright
from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.spec.base import Spec
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import read_yaml

PROFILES: Final = Path(flopwright.__file__).parent / "simulator" / "memory" / "profiles"

# Words of a framework's name, the more telling first, and the profile they point to.
_WORDS: Final = (
    ("megatron-deepspeed", "megatron_deepspeed"),
    ("bridge", "megatron_bridge"),
    ("nemo", "megatron_bridge"),
    ("ngc", "megatron_bridge"),
    ("megatron", "megatron"),
    ("simumax", "megatron"),
    ("mindspeed", "megatron"),
    ("primus", "megatron"),
    ("titan", "torchtitan"),
    ("internevo", "internevo"),
    ("internlm", "internevo"),
    ("torchtune", "torchtune"),
    ("kempner", "kempnerforge"),
    ("deepspeed", "deepspeed"),
    ("trainer", "deepspeed"),
    ("pytorch nvidia release", "megatron_bridge"),
)
DEFAULT: Final = "fsdp2"


class MemoryProfile(Spec):
    """One stack's habits. Bytes are for one number, element or tensor, as the name says.

    Attributes:
        weight_bytes, gradient_bytes, master_bytes, moment_bytes: of a trained number; None
            takes the workload's precision. moment_bytes is one of Adam's two.
        step_gradient_bytes: a number's second gradient, made for the update and sharded like
            the optimizer's state, and other numbers that it makes for a moment.
        flat_update: the update's tensors are single ones of a rank's whole part.
        frees_gradients: gradients are freed after the update, not set to zero.
        fsdp: weights are gathered group by group (zero_stage 3), and how many groups at once.
        keeps_root: embedding and head stay gathered from the forward to the end.
        reduce_bytes: a number of the buffer that one group's gradients are reduced from.
        bucket_numbers, buckets: persistent buffers of gradients in the compute dtype.
        weight_gradients: "separate": a tensor a matrix until it is added to its place;
            "fused": the product adds to its place; "dummy": fused, and autograd is handed an
            uninitialised tensor of every weight's shape, kept for good.
        dropout: models with learned positions train with dropout, whose masks are kept.
        attention: "unfused" keeps the scores of every head.
        eager: elementwise ops are not fused: SwiGLU keeps the activated gate too, keys and
            values are repeated to all heads, norms keep their fp32 input.
        selective: what selective recompute without a list means: "tags" (Kimi K2's list),
            "core_attention", or "second_products": outputs of attention and of every second
            matrix product are kept, nothing else.
        fp8_inputs: FP8 products keep their inputs in FP8.
        fp8_weights: bytes a layer's weight of the FP8 copies kept beside it.
        expert_outputs: the experts' results are kept for the combine weights.
        logit_bytes: alive for each logit at the loss; of which kept_logit_bytes wait for the
            backward; logit_gradient_bytes stand while the head runs backward.
        cuts_logits: tensor-parallel ranks hold a part of the vocabulary's logits each.
        loss_chunks: pieces the loss is computed in.
        pad_vocab_to: a rank's part of the vocabulary is a multiple of this.
        attention_mask: a [sequence, sequence] byte mask of each sequence is kept.
        workspaces: matrix-product workspaces (32 MiB each from Hopper on, 8 MiB before).
        frozen_bytes: of a number that is not trained beside adapters; None: the workload's.
        lora: matrices with adapters: "all", or "attention" (the others' inputs are not kept).
    """

    name: str = Field(min_length=1)
    source: str = Field(min_length=1)
    weight_bytes: NonNegativeFloat | None = None
    gradient_bytes: NonNegativeFloat | None = None
    master_bytes: NonNegativeFloat | None = None
    moment_bytes: NonNegativeFloat | None = None
    step_gradient_bytes: NonNegativeFloat = 0.0
    flat_update: bool = False
    frees_gradients: bool = False
    fsdp: int = Field(default=2, ge=1, le=16)
    keeps_root: bool = True
    reduce_bytes: NonNegativeFloat = 4.0
    bucket_numbers: NonNegativeFloat = 0.0
    buckets: int = Field(default=0, ge=0, le=8)
    weight_gradients: Literal["separate", "fused", "dummy"] = "separate"
    dropout: bool = False
    attention: Literal["flash", "unfused"] = "flash"
    eager: bool = False
    selective: Literal["tags", "core_attention", "second_products"] = "tags"
    fp8_inputs: bool = False
    fp8_weights: NonNegativeFloat = 0.0
    expert_outputs: bool = False
    logit_bytes: PositiveFloat = 14.0
    kept_logit_bytes: NonNegativeFloat = 4.0
    logit_gradient_bytes: NonNegativeFloat = 2.0
    cuts_logits: bool = True
    loss_chunks: int = Field(default=1, ge=1, le=1024)
    pad_vocab_to: int = Field(default=1, ge=1, le=2**20)
    attention_mask: bool = False
    workspaces: int = Field(default=2, ge=0, le=16)
    frozen_bytes: NonNegativeFloat | None = None
    lora: Literal["all", "attention"] = "all"


@lru_cache(maxsize=64)
def load_profile(name: str) -> MemoryProfile:
    """Returns the profile of that name.

    Raises:
        InputError: there is none, or its file is no profile.
    """
    path = PROFILES / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in PROFILES.glob("*.yaml"))
        raise InputError(
            Violation(
                field="profile",
                value=repr(name),
                rule="no such memory profile",
                nearest_fix=did_you_mean(name, known),
            )
        )
    return validate(MemoryProfile, read_yaml(path))


def profile_of(framework: str) -> MemoryProfile:
    """Returns the profile of a framework by its name; an unknown one is taken as plain PyTorch."""
    words = framework.lower().replace("_", "-")
    for word, name in _WORDS:
        if word in words:
            return load_profile(name)
    return load_profile(DEFAULT)
