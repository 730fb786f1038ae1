"""The weights of a checkpoint by what they are: plain tensors, or numbers with their scales.

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flopwright.errors import Violation
from flopwright.models.formats.layout import LAYOUTS, Layout, Shape
from flopwright.models.hf.files import crc32s, problem
from flopwright.models.hf.header import Header, StoredTensor

_FP8: Final = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class Span:
    """A stored tensor and where its bytes lie.

    Attributes:
        begin: first byte in the file.
        crc32: of its bytes, None where the file does not say.
    """

    file: Path
    name: str
    dtype: str
    shape: Shape
    begin: int
    nbytes: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor of the model as a checkpoint holds it.

    Attributes:
        name: of the tensor where it is not quantised.
        shape: of the matrix, [..., rows, columns]; of a plain tensor as it is stored.
        layout: None of a plain tensor.
        parts: by the endings of the layout; of a plain tensor by "".
    """

    name: str
    shape: Shape
    layout: Layout | None
    parts: Mapping[str, Span]

    @property
    def plain_shape(self) -> Shape:
        """Shape of the tensor where it is not quantised."""
        if self.layout is None or not self.layout.stacked:
            return self.shape
        return (*self.shape[:-2], self.shape[-1], self.shape[-2])

    @property
    def file(self) -> Path:
        """File of its numbers."""
        return next(iter(self.parts.values())).file

    @property
    def nbytes(self) -> int:
        """Bytes of all of its parts."""
        return sum(span.nbytes for span in self.parts.values())


def spans_of(headers: Mapping[Path, Header]) -> tuple[dict[str, Span], list[Violation]]:
    """Returns every stored tensor by name in the files' order, and those that stand twice."""
    spans: dict[str, Span] = {}
    problems = []
    for path, header in headers.items():
        sums = crc32s(path, header)
        for name, t in sorted(header.tensors.items(), key=lambda item: item[1].end):
            if name in spans:
                problems.append(problem(path, name, f"also in {spans[name].file.name}"))
            spans[name] = _span(path, header, name, t, sums.get(name))
    return spans, problems


def _span(path: Path, header: Header, name: str, t: StoredTensor, crc32: int | None) -> Span:
    begin = header.start + t.end - t.nbytes
    return Span(path, name, t.dtype, t.shape, begin, t.nbytes, crc32)


def stored_weights(
    spans: Mapping[str, Span], layout: Layout | None
) -> tuple[list[StoredWeight], list[Violation]]:
    """Returns the weights that stored tensors make, and everything wrong with their parts."""
    if layout is None:
        plain = [StoredWeight(s.name, s.shape, None, {"": s}) for s in spans.values()]
        return plain, [v for s in spans.values() for v in _undeclared(s)]
    weights, problems, taken = [], [], set[str]()
    for name in spans:
        if not _is_numbers(spans[name], layout):
            continue
        base = name.removesuffix(layout.parts[0].ending)
        there = {
            p.ending: spans[base + p.ending] for p in layout.parts if base + p.ending in spans
        }
        taken.update(span.name for span in there.values())
        wrong = _wrong_parts(spans[name], base, there, layout)
        problems.extend(wrong)
        if not wrong:
            shape = layout.weight_shape(spans[name].shape)
            weights.append(StoredWeight(base + layout.ending, shape, layout, there))
    for span in spans.values():
        if span.name in taken:
            continue
        if span.name.endswith(tuple(p.ending for p in layout.parts[1:])):
            problems.append(problem(span.file, span.name, "scales of a weight that is not there"))
        weights.append(StoredWeight(span.name, span.shape, None, {"": span}))
    order = {name: i for i, name in enumerate(spans)}
    weights.sort(key=lambda w: order[next(iter(w.parts.values())).name])
    return weights, problems


def _is_numbers(span: Span, layout: Layout) -> bool:
    if layout.name == "block_fp8":
        return span.dtype == _FP8
    return span.name.endswith(layout.parts[0].ending)


def _wrong_parts(
    numbers: Span, base: str, there: Mapping[str, Span], layout: Layout
) -> list[Violation]:
    """Returns what is wrong with one weight's parts."""
    matrix = 4 if layout.name == "mxfp4_blocks" else 2
    if not numbers.name.endswith(layout.parts[0].ending) or len(numbers.shape) != matrix:
        return [problem(numbers.file, numbers.name, "not a matrix's numbers", numbers.dtype)]
    shape = layout.weight_shape(numbers.shape)
    problems = []
    for part in layout.parts:
        name = base + part.ending
        if part.ending not in there:
            rule = f"its {part.ending.strip('._')} is missing: the shard lacks {name}"
            problems.append(problem(numbers.file, numbers.name, rule))
            continue
        span, wanted = there[part.ending], part.shape(shape)
        if span.shape != wanted:
            rule = f"wrong shape for a weight of {list(shape)}"
            problems.append(
                problem(span.file, name, rule, f"{list(span.shape)}", f"{list(wanted)}")
            )
        if span.dtype not in part.dtypes:
            rule, limit = "this dtype cannot be read here", ", ".join(part.dtypes)
            problems.append(problem(span.file, name, rule, span.dtype, limit))
    if shape[-1] % layout.whole_columns:
        limit = f"a multiple of {layout.whole_columns}"
        problems.append(problem(numbers.file, base, "columns", str(shape[-1]), limit))
    return problems


def _undeclared(span: Span) -> list[Violation]:
    """Returns a violation for a tensor of a format that the config does not name."""
    endings = tuple(p.ending for x in LAYOUTS.values() for p in x.parts if p.ending != ".weight")
    quantised = span.dtype == _FP8 or (
        span.name.endswith(endings) and span.dtype not in {"F64", "F32", "F16", "BF16"}
    )
    if not quantised:
        return []
    rule = "a quantised tensor, but config.json has no quantization_config"
    return [problem(span.file, span.name, rule, span.dtype)]
