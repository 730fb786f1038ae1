"""The questions that can be asked of a plan, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.planner.questions import memory, modules, precision, recompute, sharding
from flopwright.planner.questions.answer import Answering


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question: its words, and the function that answers it."""

    words: str
    answer: Answering


def _ask(words: str, answer: Answering) -> Question:
    return Question(words=words, answer=answer)


# What users asked of a memory estimator for FSDP (pytorch/pytorch pull 125323).
QUESTIONS: Final[dict[str, Question]] = {
    "expected_peak": _ask("What peak memory is expected?", memory.expected_peak),
    "sharding_stage": _ask(
        "What does another FSDP wrapping (ZeRO stage) change?", sharding.sharding_stage
    ),
    "best_batch": _ask("Which micro-batch is best?", memory.best_batch),
    "longest_sequence": _ask("How long a sequence fits?", memory.longest_sequence),
    "data_parallel_size": _ask(
        "What does the data-parallel size change?", sharding.data_parallel_size
    ),
    "optimizer_on_cpu": _ask(
        "What does the optimizer in host memory save?", memory.optimizer_on_cpu
    ),
    "recompute_policy": _ask("Which recompute policy?", recompute.recompute_policy),
    "recompute_groups": _ask(
        "What does recomputing each group save and cost?", recompute.recompute_groups
    ),
    "recompute_depth": _ask(
        "How many layers of each chunk have to be recomputed?", recompute.recompute_depth
    ),
    "fp32_gradients": _ask("What do fp32 gradients cost?", precision.fp32_gradients),
    "precision_recipe": _ask("Which mixed precision?", precision.precision_recipe),
    "when_hybrid": _ask("When does hybrid sharding (HSDP) pay?", sharding.when_hybrid),
    "smaller_mesh": _ask("Would resharding to a smaller mesh pay?", sharding.smaller_mesh),
    "keep_unsharded": _ask(
        "Can weights stay gathered after the forward?", sharding.keep_unsharded
    ),
    "largest_activations": _ask(
        "Which module dominates the activations?", modules.largest_activations
    ),
    "largest_unit": _ask("Which unit holds most unsharded memory?", modules.largest_unit),
    "what_recompute_keeps": _ask(
        "Why does recompute not release more?", recompute.what_recompute_keeps
    ),
}


def question(name: str) -> Question:
    """Returns the question of that name.

    Raises:
        InputError: there is none.
    """
    if name not in QUESTIONS:
        raise InputError(
            Violation(
                field="question",
                value=repr(name),
                rule="no such question",
                nearest_fix=did_you_mean(name, QUESTIONS),
            )
        )
    return QUESTIONS[name]
