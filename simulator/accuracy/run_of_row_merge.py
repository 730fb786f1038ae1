"""Repeats of one configuration as one run: releases, republications, copied rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Final

from flopwright.simulator.accuracy.rows import Configuration, same_words

if TYPE_CHECKING:
    from flopwright.simulator.accuracy.run_of_row import PublishedRun

_SAME_VALUE: Final = 1e-6


def source_family(configuration: Configuration) -> str:
    """Returns who published a row: the repository or paper, without version, file and commit."""
    text = configuration.text("source").lower()
    text = re.sub(r"^(https?://)?(www\.)?(github\.com/)?", "", text)
    paper = re.match(r"arxiv[:\s]*(\d{4}\.\d{4,5})", text)
    if paper:
        return f"arxiv:{paper[1]}"
    first = re.split(r"[:@\s(]", text, maxsplit=1)[0]
    parts = first.split("/")
    name = "/".join(parts[:2]) if len(parts) > 1 else first
    name = re.sub(r"[_-]?v\d+(\.\d+)*$", "", name)
    return name or re.split(r"-\d|$", configuration.id)[0] or "unknown"


def merge(
    runs: Sequence[tuple[Configuration, PublishedRun]],
) -> tuple[PublishedRun, ...]:
    """Returns one run for each configuration, measured as the median of its repeats.

    Two are repeats if publisher, stack, model, GPU, workload and plan agree, and so
    does either the measured value or what the notes say of the run (not of its release).
    """
    groups: dict[tuple[object, ...], list[list[tuple[Configuration, PublishedRun]]]] = {}
    for configuration, run in runs:
        clusters = groups.setdefault(_key(configuration, run), [])
        mine = next((c for c in clusters if any(_repeats(configuration, run, o) for o in c)), None)
        if mine is None:
            clusters.append([(configuration, run)])
        else:
            mine.append((configuration, run))
    return tuple(_merged([r for _, r in c]) for clusters in groups.values() for c in clusters)


def _key(configuration: Configuration, run: PublishedRun) -> tuple[object, ...]:
    # Two recipes of FP8 that are priced alike are two runs all the same.
    precision = "rowwise" in configuration.text("precision").lower()
    # One framework in several releases is one, two frameworks of a family are not.
    framework = re.sub(r"[^a-z]+", " ", re.sub(r"v?\d[\w.]*", "", run.framework.lower())).strip()
    return (
        run.source, framework, run.stack, run.model_name, run.gpu, run.num_gpus, precision,
        run.scenario.model.num_layers, run.scenario.model.content_hash(),
        run.scenario.workload.content_hash(), run.plan.content_hash(),
        run.measured_step_s is None, "odd" in run.flags,
    )  # fmt: skip


def _repeats(
    configuration: Configuration, run: PublishedRun, other: tuple[Configuration, PublishedRun]
) -> bool:
    a, b = run.measured_step_s, other[1].measured_step_s
    if a is not None and b is not None and abs(a / b - 1) < _SAME_VALUE:
        return True
    if a is None and b is None and run.memory == other[1].memory:
        return True
    return same_words([configuration.notes]) == same_words([other[0].notes])


def _merged(repeats: Sequence[PublishedRun]) -> PublishedRun:
    first = repeats[0]
    if len(repeats) == 1:
        return first
    steps = [r.measured_step_s for r in repeats if r.measured_step_s is not None]
    memory: dict[str, list[float]] = {}
    for run in repeats:
        for definition, value in run.memory.items():
            memory.setdefault(definition, []).append(value)
    return replace(
        first,
        row_ids=tuple(dict.fromkeys(i for r in repeats for i in r.row_ids)),
        measured_step_s=median(steps) if steps else None,
        memory={k: median(v) for k, v in memory.items()},
        flags=first.flags | {"merged"},
    )
