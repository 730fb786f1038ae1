"""Learning rate, batch and vocabulary that the laws advise for a model and its data."""

from __future__ import annotations

from typing import Final

from flopwright.planner import laws
from flopwright.planner.recommend_answer import RateAndBatch, VocabularyOption
from flopwright.spec.flops import attention_flops_per_token
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import num_active_params
from flopwright.spec.scenario import Scenario

_VOCABULARIES: Final = (32_000, 65_536, 131_072, 262_144)
_ROUND_VOCABULARY: Final = 128


def rates_of(chosen: Scenario) -> tuple[RateAndBatch, ...]:
    """Returns rate and batch by every law, the one of the run's kind first."""
    model, workload = chosen.model, chosen.workload
    params = num_active_params(model, head=False)
    run = laws.Run(
        params=params,
        tokens=workload.total_tokens,
        flops_per_token=laws.FLOPS_PER_PARAM_TOKEN * params
        + attention_flops_per_token(model, workload.seq_len, "full"),
    )
    found = laws.hyperparameters(run, workload.optimizer.kind, moe=model.moe is not None)
    return tuple(
        RateAndBatch(
            law=h.law,
            source=h.source,
            learning_rate=h.learning_rate,
            batch_tokens=h.batch_tokens,
            batch_sequences=h.batch_tokens / workload.seq_len,
            inside=h.inside,
        )
        for h in found
    )


def vocabulary_options(model: ModelSpec, seq_len: int) -> tuple[VocabularyOption, ...]:
    """Returns vocabulary sizes against weights, context and FLOPs for the same text.

    Embedding and head hold 2 V h weights (V h where they are one table); a text is so many
    tokens shorter as the vocabulary's tokens a character are fewer (planner/laws.py).
    """
    body = num_active_params(model, head=False)
    tables = 1 if model.tied_embeddings else 2
    optimal = tuple(v / model.hidden_size for v in laws.vocabulary_params(body))
    names = dict.fromkeys(_VOCABULARIES, "") | {
        _rounded(optimal[0]): "optimal by isoFLOP curves",
        _rounded(optimal[1]): "optimal by the derivative",
        model.vocab_size: "the model's own",
    }

    def flops(vocabulary: int) -> float:
        return (body + vocabulary * model.hidden_size) * laws.tokens_per_character(vocabulary)

    own = laws.tokens_per_character(model.vocab_size)
    options = []
    for vocabulary, why in sorted(names.items()):
        params = tables * vocabulary * model.hidden_size
        density = laws.tokens_per_character(vocabulary)
        option = VocabularyOption(
            vocab_size=vocabulary,
            params=params,
            share=params / (body + params),
            tokens_per_character=density,
            seq_len=max(1, round(seq_len * density / own)),
            flops_per_text=flops(vocabulary) / flops(model.vocab_size),
            why=why,
        )
        options.append(option)
    return tuple(options)


def _rounded(vocabulary: float) -> int:
    return max(_ROUND_VOCABULARY, _ROUND_VOCABULARY * round(vocabulary / _ROUND_VOCABULARY))
