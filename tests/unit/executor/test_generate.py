"""Text out of checkpoints, of one rank and of many."""

import json
import math
import threading

import pytest
import torch

from flopwright.cli import main
from flopwright.errors import InputError
from flopwright.executor.checkpoint.boxes import TensorSlice
from flopwright.executor.checkpoint.save import RunState, save
from flopwright.executor.data.tokenizer import CharacterTokenizer, train_bpe
from flopwright.executor.generate import TextModel, generate, load_text_model
from flopwright.models.cache import KvCache
from flopwright.models.transformer.module import build_stage, init_weights_
from flopwright.spec.load import load_model

CHARACTERS = "abcdefghijklmnopqrst"


def small(vocab_size):
    return load_model("first_steps").model_copy(update={"vocab_size": vocab_size})


def whole(spec, seed=0):
    stage = build_stage(spec, range(-1, spec.num_layers + 1))
    init_weights_(stage, spec, seed)
    return stage.eval()


def write(folder, spec, tokenizer, tensors=None, **ranks):
    path = folder.parent / f"{folder.name}-tokenizer.json"
    path.write_text(tokenizer.to_json())
    run = RunState(step=5, seed=0, model=spec, tokenizer_file=path)
    given = whole(spec).state_dict() if tensors is None else tensors
    save(folder, given, run, **ranks)


@pytest.fixture
def checkpoint(tmp_path):
    write(tmp_path / "checkpoint-x", small(20), CharacterTokenizer(CHARACTERS))
    return tmp_path / "checkpoint-x"


def test_greedy_text_is_the_argmax_of_the_whole_model(checkpoint):
    model = load_text_model(checkpoint)
    assert model.step == 5
    result = generate(model, "abc", 12)
    stage, ids = whole(model.spec), [0, 1, 2]
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(stage(torch.tensor([ids]))[0, -1].argmax()))
    assert list(result.token_ids) == ids[3:]
    assert result.text == "".join(CHARACTERS[i] for i in ids[3:])
    assert (result.prompt_tokens, result.stopped) == (3, "length")


def test_ranks_slices_and_stages_generate_like_the_whole_model(tmp_path):
    spec = load_model("kimi_k2_mini").model_copy(
        update={"num_layers": 2, "vocab_size": 20, "hidden_size": 32, "max_seq_len": 16}
    )
    tensors = whole(spec).state_dict()
    parts = [{}, {}, {}, {}]  # 2 stages x 2 expert ranks
    for name, tensor in tensors.items():
        stage = int(name.startswith(("model.layers.1", "model.norm", "lm_head")))
        for ep in range(2):
            if ".experts." in name:
                half = tensor.shape[0] // 2
                part = TensorSlice(
                    tensor[ep * half : (ep + 1) * half],
                    tuple(tensor.shape),
                    (ep * half, *(0,) * (tensor.ndim - 1)),
                )
                parts[2 * stage + ep][name] = part
            elif ep == 0:
                parts[2 * stage][name] = tensor
    barrier = threading.Barrier(4)
    threads = [
        threading.Thread(
            target=write,
            args=(tmp_path / "many", spec, CharacterTokenizer(CHARACTERS), part),
            kwargs={"rank": rank, "world_size": 4, "barrier": barrier.wait},
        )
        for rank, part in enumerate(parts)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    write(tmp_path / "one", spec, CharacterTokenizer(CHARACTERS), tensors)
    many, one = load_text_model(tmp_path / "many"), load_text_model(tmp_path / "one")
    for name, tensor in one.stage.state_dict().items():
        assert torch.equal(tensor, many.stage.state_dict()[name]), name
    # longer than max_seq_len: the window moves on
    assert generate(many, "abc", 20) == generate(one, "abc", 20)


@pytest.mark.slow
def test_sampling_follows_the_softmax_and_its_seed(checkpoint):
    model = load_text_model(checkpoint)
    with torch.no_grad():
        model.stage.lm_head.weight.mul_(20)  # fresh weights are too even to tell temperatures
        logits = model.stage(torch.tensor([[3]]))[0, -1]
    draws = 600
    for temperature in (0.1, 5.0):
        p = torch.softmax(logits / temperature, -1)
        first = [generate(model, "d", 1, temperature, seed).token_ids[0] for seed in range(draws)]
        token = int(p.argmax())
        expected, sigma = draws * p[token].item(), math.sqrt(draws * p[token] * (1 - p[token]))
        assert abs(first.count(token) - expected) < 5 * sigma
    assert generate(model, "d", 9, 1.0, 4) == generate(model, "d", 9, 1.0, 4)
    assert generate(model, "d", 9, 1.0, 4) != generate(model, "d", 9, 1.0, 5)


class _Fixed(torch.nn.Module):
    """A model that always writes the same ids."""

    def __init__(self, ids, vocab_size):
        super().__init__()
        self.ids, self.vocab_size, self.calls = ids, vocab_size, 0

    def make_cache(self, batch, capacity):
        return KvCache(capacity=capacity, layers={})

    def forward(self, tokens, cache):
        cache.advance(tokens.shape[1])
        out = torch.zeros(1, tokens.shape[1], self.vocab_size)
        out[0, -1, self.ids[self.calls]] = 1
        self.calls += 1
        return out


def test_pieces_join_to_the_text_and_the_end_token_stops():
    tokenizer = train_bpe(["plain words only " * 50], 256 + 4 + 256)
    text = "x é 🙂 z"
    ids = [*tokenizer.encode(text), tokenizer.eos_id, 0]
    pieces = []
    model = TextModel(
        stage=_Fixed(ids, tokenizer.vocab_size), tokenizer=tokenizer, spec=small(516), step=1
    )
    result = generate(model, "", 50, on_text=pieces.append)
    assert "".join(pieces) == result.text == text
    assert "🙂" in pieces
    assert not any("\ufffd" in p for p in pieces)
    assert result.stopped == "end"
    assert result.prompt_tokens == 1


def test_a_missing_weight_is_named(tmp_path):
    spec = small(20)
    tensors = dict(whole(spec).state_dict())
    del tensors["lm_head.weight"]
    tensors["model.norm.weight"] = torch.ones(3)
    write(tmp_path / "ck", spec, CharacterTokenizer(CHARACTERS), tensors)
    with pytest.raises(InputError) as error:
        load_text_model(tmp_path / "ck")
    assert {v.field for v in error.value.violations} == {"lm_head.weight", "model.norm.weight"}


def test_prompts_that_cannot_be_used(checkpoint):
    model = load_text_model(checkpoint)
    for prompt, rule in (("", "at least one character"), ("z", "'z'"), ("\ud800", "not valid")):
        with pytest.raises(InputError, match=rule):
            generate(model, prompt, 1)


def test_the_verb_prints_text_or_json(checkpoint, capsys):
    arguments = ["generate", str(checkpoint.parent), "--prompt", "abc", "--max-tokens", "7"]
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 0
    text = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert text == f"abc{data['text']}\n"
    assert len(data["token_ids"]) == 7
    assert (data["model"], data["step"]) == ("first_steps", 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such folder"),
        (["{}", "--prompt", "Z"], "characters that the training text does not have"),
        (["{}", "--prompt", "a", "--step", "9"], "steps there: 5"),
    ],
)
def test_wrong_input_ends_with_code_2(checkpoint, capsys, arguments, message):
    with pytest.raises(SystemExit) as done:
        main(["generate", *(a.format(checkpoint) for a in arguments)])
    assert done.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--temperature", "1e-45", "--temperature"),
        ("--temperature", "inf", "--temperature"),
        ("--seed", "99999999999999999999999", "--seed"),
    ],
)
def test_sampling_outside_its_bounds_is_refused(checkpoint, capsys, option, value, field):
    with pytest.raises(SystemExit) as end:
        main(["generate", str(checkpoint), "--prompt", "abc", option, value, "--json"])
    assert end.value.code == 2
    assert json.loads(capsys.readouterr().out)["error"][0]["field"] == field


@pytest.mark.parametrize("temperature", [1e-3, 1e300])
def test_extreme_temperatures_sample(checkpoint, temperature):
    model = load_text_model(checkpoint)
    result = generate(model, "abc", 4, temperature, 2**63 - 1)
    assert len(result.token_ids) == 4
    with pytest.raises(InputError, match="temperature"):
        generate(model, "abc", 4, math.nan)
