"""The memory profile of a published run: its stack's, and what its rows say beside that."""

from __future__ import annotations

import re
from typing import Final

from flopwright.simulator.accuracy.run_of_row import PublishedRun
from flopwright.simulator.memory.profile import MemoryProfile, profile_of
from flopwright.spec.from_columns import GPT_VOCAB
from flopwright.spec.scenario import Scenario

# Loss that is compiled keeps its logits and makes their gradient, both narrow.
_COMPILED_LOSS_FROM: Final = 2025
_GPT2_VOCAB: Final = 50_257
_LOSS_CHUNKS: Final = 8  # torchtune's chunked loss, by default
_NF4_BYTES: Final = 0.5 + 0.016  # 4 bits and, doubly quantised, 0.127 bits of scales (QLoRA)
# Steps of a cumulative ladder, in their order, and what each changes.
_LADDER: Final[tuple[tuple[str, dict[str, object]], ...]] = (
    ("packed", {}),
    ("compile", {"eager": False}),
    ("chunked ce", {"loss_chunks": _LOSS_CHUNKS}),
    ("activation ckpt", {}),
    ("optimizer in backward", {"gradient_bytes": 0.0}),
    ("activation offload", {}),
    ("8-bit adamw", {"moment_bytes": 1.0}),
)


def scenario_of_run(run: PublishedRun, profile: MemoryProfile) -> Scenario:
    """Returns a run's scenario; an assumed GPT vocabulary is GPT-2's, which its stack pads."""
    model = run.scenario.model
    assumed = f"vocabulary ({GPT_VOCAB})" in run.assumed
    if profile.pad_vocab_to == 1 or not assumed or model.vocab_size != GPT_VOCAB:
        return run.scenario
    plain = model.model_copy(update={"vocab_size": _GPT2_VOCAB})
    return run.scenario.model_copy(update={"model": plain})


def profile_of_run(run: PublishedRun) -> MemoryProfile:
    """Returns the profile of a run's stack, with what its rows say of it."""
    profile = profile_of(f"{run.framework or run.stack.framework}")
    said = f"{run.notes} {run.where} {run.id}".lower()
    changes: dict[str, object] = {}
    if "no-gradient-accumulation-fusion" in said:
        changes["weight_gradients"] = "separate"
    # Names of Megatron's own tests say "te" where Transformer Engine builds the layers.
    local = re.search(r"gpt3_mcore_tp\d", said) is not None
    if run.stack.era == "unfused" or "attention-backend=unfused" in said or local:
        changes["attention"] = "unfused"
    if "hidden-dropout 0" in said or "no dropout" in said:
        changes["dropout"] = False
    if re.search(r"\bcompile", f"{said} {run.stack.era}") and "eager" not in run.stack.era:
        changes["eager"] = False
        if (run.year or 0) >= _COMPILED_LOSS_FROM and profile.name == "torchtitan":
            changes |= {"logit_bytes": 4.0, "kept_logit_bytes": 2.0, "logit_gradient_bytes": 2.0}
    if re.search(r"cross.entropy.loss.fusion", said):
        changes["logit_bytes"] = 10.0  # a fused function cannot work in place
    if re.search(r"chunked (ce|cross|loss)", said):
        changes["loss_chunks"] = _LOSS_CHUNKS
    if "qlora" in run.flags:
        changes["frozen_bytes"] = _NF4_BYTES
    changes |= _ladder(said)
    return profile.model_copy(update=changes)


def _ladder(said: str) -> dict[str, object]:
    """Returns what a row of a cumulative ladder has from the steps before its own."""
    found = re.search(r"cumulative optimisation ladder, step: \+?([^;]+)", said)
    if not found:
        return {}
    step = found[1].strip()
    names = [name for name, _ in _LADDER]
    reached = next((i for i, name in enumerate(names) if name in step), None)
    if reached is None and "lora" in step:
        reached = names.index("activation ckpt")
    changes: dict[str, object] = {}
    for _, change in _LADDER[: 0 if reached is None else reached + 1]:
        changes |= change
    return changes
