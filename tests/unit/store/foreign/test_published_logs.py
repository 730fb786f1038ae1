"""Lines that were published are read, field by field; see logs/README.md for where from."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopwright.errors import InputError
from flopwright.store.foreign.engines import EngineKind, read_engine_log
from flopwright.store.foreign.steps import read_steps
from flopwright.store.foreign.text import iso_of, last_stamp
from flopwright.store.foreign.verl import read_verl

LOGS = Path(__file__).with_name("logs")


def test_vllm() -> None:
    lines = read_engine_log(LOGS / "vllm.log", "vllm").lines
    assert [x.time_s for x in lines[:3]] == [0.0, 10.0, 20.0]
    assert {x.phase for x in lines} == {"mixed"}
    third = lines[2]
    assert (third.running, third.waiting, third.kv_usage) == (18, 33, pytest.approx(0.877))
    assert (third.prompt_tokens_per_s, third.generated_tokens_per_s) == (12068.8, 734.9)
    assert lines[3].prefix_hit_rate == pytest.approx(0.911)
    assert lines[3].accept_length == 2.49
    assert lines[2].accept_length is None
    assert [x.line for x in lines] == [2, 3, 4, 5]


def test_vllm_before_v1() -> None:
    lines = read_engine_log(LOGS / "vllm_v0.log", "vllm").lines
    assert [(x.running, x.waiting, x.generated_tokens_per_s) for x in lines] == [
        (1, 0, 15.5), (1, 0, 15.3),
    ]  # fmt: skip
    assert lines[1].time_s == 5.0


def test_sglang() -> None:
    lines = read_engine_log(LOGS / "sglang.log", "sglang").lines
    assert [x.phase for x in lines] == ["prefill", "prefill", "decode", "decode", "prefill"]
    assert (lines[0].new_tokens, lines[0].prompt_tokens_per_s) == (148, 2074.38)
    # a progress bar stands before the stamp on one line
    assert (lines[1].time_s, lines[1].cached_tokens) == (1.0, 4)
    decode = lines[2]
    assert (decode.running, decode.context_tokens, decode.waiting) == (32, 20480, 3)
    assert (decode.generated_tokens_per_s, decode.cuda_graph) == (2511.27, True)
    assert lines[3].accept_length == 2.31
    assert (lines[4].kv_usage, lines[4].cuda_graph) == (0.02, False)


def test_verl() -> None:
    (sample,) = read_verl(LOGS / "verl.log")
    assert (sample.round, sample.round_time_s) == (2, 96.551)
    assert sample.time_s["generation"] == 74.02
    assert sample.time_s["log_probs"] == pytest.approx(3.566 + 3.42)
    assert sample.time_s["update"] == 14.302
    assert sum(sample.time_s.values()) == pytest.approx(96.551)
    assert sample.figures["response_length/mean"] == 324.958
    assert sample.figures["critic/advantages/min"] == -0.73


def test_megatron() -> None:
    (line,) = read_steps(LOGS / "megatron.log", "megatron").lines
    assert (line.step, line.step_time_s, line.line) == (1, 271.607, 2)
    assert line.flops_per_s_per_gpu == pytest.approx(40.4e12)
    assert (line.global_batch_size, line.loss) == (1024, 11.92634)


def test_dates_are_the_logs_own() -> None:
    """As POSIX seconds of the printed clock in UTC (`date -u -d "..." +%s`)."""
    assert read_steps(LOGS / "megatron.log", "megatron").ended_s == 1748359387
    assert read_engine_log(LOGS / "sglang.log", "sglang").ended_s == 1787476191
    # no year stands in the line
    assert read_engine_log(LOGS / "vllm.log", "vllm").ended_s is None


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ("[titan] 2025-05-27 15:23:07,123 - root - INFO - ", 1748359387.0),
        ("[2025-05-27 15:23:06,551] [INFO] [2025-05-27 15:23:07,551] [timer.py:264:stop] ",
         1748359387.0),
        ("2025-05-27T15:23:07.123456Z stderr F ", 1748359387.0),
        ("2025-13-27 15:23:07 ", None),
        ("step 5: ", None),
    ],
)  # fmt: skip
def test_the_last_stamp_before_a_line_counts(text: str, at_s: float | None) -> None:
    assert last_stamp(text) == at_s
    assert at_s is None or iso_of(at_s) == "2025-05-27T15:23:07+00:00"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_every_cut_of_an_engines_last_line_is_whole_or_named(
    tmp_path: Path, kind: EngineKind
) -> None:
    """A log is cut anywhere: what is read is right, or the line is named with its rule."""
    text = (LOGS / f"{kind}.log").read_text()
    whole = read_engine_log(LOGS / f"{kind}.log", kind).lines
    path, refused = tmp_path / "cut.log", 0
    for end in range(len(text) - 560, len(text)):
        path.write_text(text[:end])
        try:
            found = read_engine_log(path, kind).lines
        except InputError as error:
            (violation,) = error.violations
            assert (violation.file, violation.rule[:21]) == (str(path), "the line is cut short")
            refused += 1
        else:
            for mine, theirs in zip(found, whole, strict=False):
                known = mine.model_dump(exclude_none=True)
                assert known == {k: v for k, v in theirs.model_dump().items() if k in known}
    assert refused > 20


def test_a_cut_megatron_line_is_named(tmp_path: Path) -> None:
    text = (LOGS / "megatron.log").read_text()
    path, refused = tmp_path / "cut.log", 0
    start = text.index("consumed samples") + 20
    for end in range(start, len(text.rstrip()) - 1):
        path.write_text(text[:end])
        with pytest.raises(InputError) as caught:
            read_steps(path, "megatron")
        refused += 1
        assert caught.value.violations[0].line == 2
    assert refused > 200


def test_a_cut_verl_line_is_named(tmp_path: Path) -> None:
    text = (LOGS / "verl.log").read_text()
    path = tmp_path / "cut.log"
    path.write_text(text[: text.index("timing_s/step")])
    with pytest.raises(InputError, match=r"cut\.log:2.*no timing_s/step"):
        read_verl(path)


def test_other_text_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "other.log"
    path.write_text("hello\n")
    for read in (
        lambda: read_verl(path),
        lambda: read_engine_log(path, "vllm"),
        lambda: read_engine_log(path, "sglang"),
        lambda: read_steps(path, "megatron"),
        lambda: read_steps(path, "torchtitan"),
        lambda: read_steps(path, "deepspeed"),
    ):
        with pytest.raises(InputError, match="holds no line of"):
            read()
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is no text"):
        read_verl(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_verl(tmp_path / "none.log")


def test_two_runs_in_one_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.log"
    line = (LOGS / "megatron.log").read_text().splitlines()[1]
    path.write_text(f"{line}\n{line}\n")
    with pytest.raises(InputError, match=r"twice\.log:2.*more than one run"):
        read_steps(path, "megatron")
