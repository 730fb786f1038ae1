"""Text out of a checkpoint: the whole model in one process, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from flopwright.errors import InputError, Violation
from flopwright.executor.checkpoint.load import checkpoint_tokenizer, load_full
from flopwright.executor.checkpoint.manifest import Manifest, find_checkpoint
from flopwright.executor.data.batches import check_tokenizer
from flopwright.executor.data.tokenizer import Tokenizer
from flopwright.models.transformer.module import Stage, build_stage
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import EMBEDDING_LAYER

# Below it, logits over the temperature may leave float32; 0 says what is then meant.
MIN_TEMPERATURE: Final = 1e-3
MAX_SEED: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A trained model with its tokenizer."""

    stage: Stage
    tokenizer: Tokenizer
    spec: ModelSpec
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What was written.

    Attributes:
        text: the new text, without the prompt.
        stopped: "end" (the end-of-document token) or "length".
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    stopped: str


def load_text_model(path: Path, step: int | None = None) -> TextModel:
    """Returns the model and tokenizer of a run's folder, a checkpoint or a step folder.

    Raises:
        InputError: no checkpoint there, a broken one, or one that lacks a tensor.
    """
    where = find_checkpoint(path, step)
    tensors, manifest = load_full(where)
    tokenizer = check_tokenizer(checkpoint_tokenizer(where, manifest), manifest.tokenizer_hash)
    stage = stage_from(tensors, manifest, where)
    return TextModel(stage=stage, tokenizer=tokenizer, spec=manifest.model, step=manifest.step)


def stage_from(tensors: dict[str, Tensor], manifest: Manifest, where: Path) -> Stage:
    """Returns the whole model with the checkpoint's weights, on the CPU, ready to evaluate.

    Raises:
        InputError: a weight of the model that is not in the checkpoint, or of another shape.
    """
    spec = manifest.model
    dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
    stage = build_stage(spec, range(EMBEDDING_LAYER, spec.num_layers + 1), dtype=dtype)
    wanted = stage.state_dict()
    wrong = [
        Violation(
            file=str(where),
            field=name,
            value=str(tuple(tensors[name].shape)) if name in tensors else "missing",
            rule=f"the model needs this tensor with shape {tuple(tensor.shape)}",
            nearest_fix="use an earlier checkpoint",
        )
        for name, tensor in wanted.items()
        if name not in tensors or tensors[name].shape != tensor.shape
    ]
    if wrong:
        raise InputError(wrong)
    stage.load_state_dict({name: tensors[name] for name in wanted})
    stage.eval()
    return stage


def generate(
    model: TextModel,
    prompt: str,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    on_text: Callable[[str], object] | None = None,
) -> Generated:
    """Returns text that goes on from `prompt`.

    Args:
        model: see `load_text_model`.
        prompt: what comes before; an empty one begins a document.
        max_tokens: at most so many tokens; the end of a document ends it earlier.
        temperature: 0 takes the likeliest token; above 0 samples from
            softmax(logits / temperature).
        seed: of the sampling.
        on_text: called with each new piece of text that is sure to stay.

    Raises:
        InputError: a prompt that the tokenizer cannot encode; see `check_sampling`.
    """
    check_sampling(temperature, seed)
    tokenizer = model.tokenizer
    prompt_ids = _encode_prompt(tokenizer, prompt)
    new: list[int] = []
    stopped, shown = "length", 0
    for token in _tokens(model, prompt_ids, max_tokens, temperature, seed):
        if token == tokenizer.eos_id:
            stopped = "end"
            break
        new.append(token)
        text = tokenizer.decode(new)
        # An unfinished UTF-8 sequence decodes to U+FFFD and may still change.
        if on_text is not None and not text.endswith("\ufffd"):
            on_text(text[shown:])
            shown = len(text)
        if len(new) == max_tokens:
            break
    text = tokenizer.decode(new)
    if on_text is not None and shown < len(text):
        on_text(text[shown:])
    return Generated(
        text=text, token_ids=tuple(new), prompt_tokens=len(prompt_ids), stopped=stopped
    )


def check_sampling(temperature: float, seed: int) -> None:
    """Refuses what cannot be sampled with.

    Raises:
        InputError: a temperature that is neither 0 nor a finite number of at least
            MIN_TEMPERATURE, or a seed outside 0 .. MAX_SEED.
    """
    found = []
    if temperature != 0 and not MIN_TEMPERATURE <= temperature < math.inf:
        found.append(
            Violation(
                field="--temperature",
                value=f"{temperature:g}",
                rule=f"must be 0, or finite and at least {MIN_TEMPERATURE:g}",
                nearest_fix="0 takes the likeliest token",
            )
        )
    if not 0 <= seed <= MAX_SEED:
        found.append(
            Violation(
                field="--seed",
                value=str(seed),
                rule="must be a 63-bit number",
                limit=str(MAX_SEED),
            )
        )
    if found:
        raise InputError(found)


def _encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError(Violation(field="--prompt", rule="not valid text (UTF-8)")) from error
    ids = tokenizer.encode(prompt)
    if ids:
        return ids
    if tokenizer.eos_id is None:
        raise InputError(
            Violation(
                field="--prompt",
                rule="a character model needs at least one character to go on from",
            )
        )
    return [tokenizer.eos_id]


@torch.inference_mode()
def _tokens(
    model: TextModel, prompt_ids: list[int], max_tokens: int, temperature: float, seed: int
) -> Iterator[int]:
    """Yields at most max_tokens tokens one by one; the model sees the last max_seq_len of them.

    A cache keeps what attention needs of earlier tokens. Where the text has outgrown the
    context every token moves to another position, so nothing kept is of use.
    """
    ids, context = list(prompt_ids), model.spec.max_seq_len
    generator = torch.Generator().manual_seed(seed)
    cache = model.stage.make_cache(1, min(context, len(ids) + max_tokens))
    for _ in range(max_tokens):
        if len(ids) <= context:
            out = model.stage(torch.tensor([ids[cache.positions :]]), cache)
        else:
            out = model.stage(torch.tensor([ids[-context:]]))
        logits = out[0, -1, : model.tokenizer.vocab_size].float()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            weights = torch.softmax(logits / temperature, dim=-1)
            token = int(torch.multinomial(weights, 1, generator=generator))
        ids.append(token)
        yield token
