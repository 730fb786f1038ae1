"""Which stage holds which chunk of the model, and what each schedule asks of a pipeline.

Chunks are numbered in model order. Most schedules go round: chunk c stands on stage
c mod pp. In a V (arXiv 2401.10241, 6) the second half of the model comes back up: stage s
holds chunks s and 2 pp - 1 - s, and the last chunk stands beside the first.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "zb_h1",
    "zb_v",
    "dualpipe_v",
    "interleaved_1f1b_overlap",
]

V_SHAPED: Final = frozenset({"zb_v", "dualpipe_v"})
# Schedules that run a forward and a backward as a pair.
PAIRED: Final = frozenset({"dualpipe_v", "interleaved_1f1b_overlap"})
# Least and most chunks a stage of each schedule; 0 stands for any number.
CHUNKS_PER_STAGE: Final[dict[ScheduleName, tuple[int, int]]] = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved_1f1b": (2, 0),
    "zb_h1": (1, 0),
    "zb_v": (2, 2),
    "dualpipe_v": (2, 2),
    "interleaved_1f1b_overlap": (2, 0),
}
# Schedules whose chunks take micro-batches in rounds of pp where a stage holds several.
IN_ROUNDS: Final = frozenset({"interleaved_1f1b", "interleaved_1f1b_overlap", "zb_h1"})


class Pipeline(Protocol):
    """The part of a plan that places chunks."""

    @property
    def schedule(self) -> ScheduleName:
        """Name of the schedule."""
        ...

    @property
    def pp(self) -> int:
        """Stages."""
        ...

    @property
    def vpp(self) -> int:
        """Chunks a stage."""
        ...


def chunk_table(schedule: str, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    """Returns the chunks by (index on its stage, stage); as an array index, (vpp, pp).

    A chunk's index on its stage is chunk // pp in every schedule.
    """
    rows = []
    for local in range(vpp):
        row = tuple(range(local * pp, (local + 1) * pp))
        rows.append(row[::-1] if schedule in V_SHAPED and local % 2 else row)
    return tuple(rows)


def stage_of_chunk(plan: Pipeline, chunk: int) -> int:
    """Returns the stage that holds `chunk`."""
    local, within = divmod(chunk, plan.pp)
    back = plan.schedule in V_SHAPED and local % 2 == 1
    return plan.pp - 1 - within if back else within


def chunks_of_stage(plan: Pipeline, stage: int) -> tuple[int, ...]:
    """Returns the chunks that `stage` holds, in model order."""
    return tuple(row[stage] for row in chunk_table(plan.schedule, plan.pp, plan.vpp))


def fewest_microbatches(schedule: str, pp: int) -> int:
    """Returns the fewest micro-batches a schedule can run: DualPipe-V's halves need 2 pp."""
    return 2 * pp if schedule == "dualpipe_v" else 1


def in_rounds(schedule: str, vpp: int) -> bool:
    """Returns whether the micro-batches must be a multiple of pp."""
    return vpp > 1 and schedule in IN_ROUNDS
