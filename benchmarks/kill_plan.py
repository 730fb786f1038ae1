"""Which kills of which kind a campaign makes, in which runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from flopwright.plan.parallel import ParallelPlan

PER_RUN: Final = 5
# How many kills of fifty are of which kind.
SHARES: Final = {
    "half_file": 5, "no_manifest": 4, "no_name": 5, "not_pruned": 3, "rank": 15, "data": 3,
    "data_worker": 5, "launcher": 10,
}  # fmt: skip
HARDEST: Final = (
    "no_name", "half_file", "launcher", "data_worker", "rank", "no_manifest", "not_pruned", "data",
)  # fmt: skip
LONGEST_DELAY_S: Final = 0.2
# Under which plans a run goes on that changes plan at each kill.
PLANS: Final = {
    "dp2-zero1": ParallelPlan(dp_shard=2, micro_batch_size=2, zero_stage=1),
    "one": ParallelPlan(micro_batch_size=2),
    "pp2": ParallelPlan(pp=2, micro_batch_size=2),
    "fsdp2-zero3": ParallelPlan(
        dp_shard=2, micro_batch_size=2, zero_stage=3, data_parallel="fsdp2"
    ),
    "tp2": ParallelPlan(tp=2, micro_batch_size=2),
}
FIRST: Final = "dp2-zero1"
MOVED: Final = (
    ("dp2-zero1", "one", "pp2", "fsdp2-zero3"),
    ("tp2", "dp2-zero1", "one", "tp2"),
)


@dataclass(frozen=True)
class Kill:
    """One kill: of which kind and rank, at which passing of its place, after which delay."""

    kind: str
    rank: int
    count: int
    delay_s: float

    @property
    def text(self) -> str:
        """As the hook reads it; the launcher is killed from outside."""
        if self.kind == "launcher":
            return ":::"
        return f"{self.kind}:{self.rank}:{self.count}:{self.delay_s:.3f}"


@dataclass(frozen=True)
class Unit:
    """A run and its kills; `plans` are those that it goes on under, one a start."""

    name: str
    kills: tuple[Kill, ...]
    plans: tuple[str, ...] = ()

    def plan(self, start: int) -> str:
        """Returns the plan of a start, by number."""
        return self.plans[min(start, len(self.plans) - 1)] if self.plans else FIRST


def planned(count: int, seed: int) -> list[Unit]:
    """Returns runs with so many kills in all, of every kind about its share."""
    rng = random.Random(seed)
    kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
    if count < len(kinds):  # the hardest first
        kinds = (list(HARDEST) * count)[:count]
    while len(kinds) < count:
        kinds.append(rng.choice(list(SHARES)))
    rng.shuffle(kinds)
    # data is prepared at a run's start alone
    data, others = [k for k in kinds if k == "data"], [k for k in kinds if k != "data"]
    units = []
    while data or others:
        mine = [data.pop()] if data else []
        mine += [others.pop() for _ in range(min(PER_RUN - len(mine), len(others)))]
        units.append(Unit(f"run-{len(units)}", tuple(_kill(kind, rng) for kind in mine)))
    return units


def moving(seed: int) -> list[Unit]:
    """Returns the runs that change their plan at each of their kills."""
    rng = random.Random(seed + 1)
    return [
        Unit(f"moved-{i}", tuple(_kill("rank", rng, ranks=1) for _ in plans[:-1]), plans)
        for i, plans in enumerate(MOVED)
    ]


def _kill(kind: str, rng: random.Random, ranks: int = 2) -> Kill:
    either = kind in {"rank", "half_file", "data_worker"}
    steps = {"data": (1, 1), "rank": (2, 12), "data_worker": (4, 12)}.get(kind, (1, 3))
    return Kill(
        kind,
        rng.randrange(ranks) if either else 0,
        rng.randint(*steps),
        rng.uniform(0, LONGEST_DELAY_S) if kind in {"rank", "launcher"} else 0.0,
    )
