"""Whether a probe's numbers can be a machine's: its file may be damaged, or written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flopwright.errors import Violation
from flopwright.report.probe import ProbeReport
from flopwright.spec.base import Spec

KeyPath = tuple[str | int, ...]
# No call that a probe times is shorter or longer, and no count larger.
_SECONDS: Final = (1e-12, 1e6)
_LARGEST: Final = 1e24
_SIZES: Final = frozenset({"m", "k", "n", "batch"})
_GROUPS: Final = ("operators", "collectives", "overlaps", "storage", "links", "ranks")
_LEAST_SHARE_BYTES: Final = 2**26


def probe_violations(report: ProbeReport) -> Iterator[tuple[KeyPath, Violation]]:
    """Yields each number that no machine has, by its path in the file."""
    yield from _of_machine(report)
    for group in _GROUPS:
        for index, point in enumerate(getattr(report, group)):
            for name, rule, limit in _of_point(point):
                yield _at((group, index, name), getattr(point, name), rule, limit)


def _of_machine(report: ProbeReport) -> Iterator[tuple[KeyPath, Violation]]:
    where = report.fingerprint
    found = [
        ("world_size", where.world_size < 1, "a probe has ranks", "at least 1"),
        ("num_cores", where.num_cores < 1, "a machine has cores", "at least 1"),
        (
            "memory_bytes",
            where.memory_bytes < _LEAST_SHARE_BYTES * max(1, where.world_size // report.nodes),
            "every rank has memory",
            "at least 64 MiB a rank",
        ),
    ]
    for name, wrong, rule, limit in found:
        if wrong:
            yield _at(("fingerprint", name), getattr(where, name), rule, limit)
    if where.world_size >= 1 and where.world_size % report.nodes:
        rule = f"the {where.world_size} ranks stand on all nodes, equally many on each"
        yield _at(("nodes",), report.nodes, rule, "")
    if report.host_floor_s > _SECONDS[1]:
        yield _at(("host_floor_s",), report.host_floor_s, "no call takes so long", "1e6 s")


def _of_point(point: Spec) -> Iterator[tuple[str, str, str]]:
    """Yields (field, rule, limit) of a point's numbers that cannot be."""
    shortest, longest = _SECONDS
    for name, value in point:
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name.startswith("seconds") or name.endswith("_s"):
            if value > longest or (value < shortest and name != "waiting_s"):
                yield name, "no call takes so little or so long", f"{shortest:g} to {longest:g} s"
        elif name in _SIZES and value <= 0:
            yield name, "a size is larger than 0", "above 0"
        elif abs(value) > _LARGEST:
            yield name, "no machine counts so far", f"{_LARGEST:g}"


def _at(path: KeyPath, value: object, rule: str, limit: str) -> tuple[KeyPath, Violation]:
    return path, Violation(
        field=".".join(map(str, path)),
        value=f"{value}",
        rule=rule,
        limit=limit,
        nearest_fix="take this entry out of the file, or probe again",
    )
