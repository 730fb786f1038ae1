"""The plans whose numbers must equal the single process's: one row a plan.

Modes:
    a  float64 throughout, STEPS steps
    b  fp32 with the single process's expert choices replayed, STEPS steps
    c  fp32 with its own choices, FREE_STEPS steps
DeepSpeed keeps its partitions in fp32: its rows leave mode a out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

STEPS: Final = 20
FREE_STEPS: Final = 5
QUICK_STEPS: Final = 4  # of modes a and b in `make test`
MICRO_BATCH: Final = 2


@dataclass(frozen=True)
class Row:
    """One plan of the comparison.

    Attributes:
        name: unique.
        kind: what it stands for: `make test` runs the first row of each kind, in its first
            mode alone but for the kinds of ALL_MODES; CI runs every row for STEPS steps, but for
            QUICK_STEPS what `is_brief` says; same_run.py --everything all for STEPS.
        plan: fields of ParallelPlan.
        model: "k2" (MLA, experts, shared expert, bias router), "k3" (delta attention and gated
            MLA, latent experts, attention residuals, quantile balancing), "kl" (Kimi Linear: delta
            attention with free decays, MLA without positions, experts) or "llama" (GQA).
        optimizer: "adamw" or "muonclip".
        modes: out of "abc".
    """

    name: str
    kind: str
    plan: dict[str, Any] = field(default_factory=dict)
    model: str = "k2"
    optimizer: str = "adamw"
    modes: str = "abc"

    @property
    def world_size(self) -> int:
        """Ranks the plan needs."""
        sizes = [self.plan.get(a, 1) for a in ("dp_replicate", "dp_shard", "tp", "cp", "pp")]
        product = 1
        for size in sizes:
            product *= size
        return product


ALL_MODES: Final = frozenset({"single", "dp"})
V: Final = {"pp": 2, "vpp": 2}
INTERLEAVED: Final = {"schedule": "interleaved_1f1b"}
CP2: Final = {"cp": 2, "context_parallel": "all_gather"}
DP2: Final = {"dp_shard": 2}
FSDP: Final = {"dp_shard": 2, "data_parallel": "fsdp2"}
ONE_RANK: Final = (
    Row("single", "single"),
    Row("single llama", "single", model="llama"),
    Row("single k3", "single k3", model="k3"),
    Row("single kl", "single kl", model="kl"),
    Row("single k3 full recompute", "recompute", {"recompute": "full"}, "k3", modes="a"),
    Row("single k3 recompute", "recompute", {"recompute": "selective"}, "k3", modes="a"),
    Row("single muonclip", "muonclip", optimizer="muonclip"),
    Row("single zb_h1", "split backward", {"schedule": "zb_h1"}, modes="a"),
    Row("single full recompute", "recompute", {"recompute": "full"}),
    Row("single selective recompute", "recompute", {"recompute": "selective"}),
    Row("single offload", "offload", {"schedule": "gpipe", "activation_offload": True}),
)
TWO_RANKS: Final = (
    Row("dp2", "dp", DP2),
    Row("dp2 llama", "dp", DP2, "llama"),
    Row("dp2 ep2 k3", "k3 ep", DP2 | {"ep": 2}, "k3", modes="ab"),
    Row("fsdp2 zero3 k3", "zero3", FSDP | {"zero_stage": 3}, "k3", modes="a"),
    Row("pp2 1f1b k3", "k3 pp", {"pp": 2}, "k3", modes="ab"),
    Row("pp2 zb_v k3", "k3 zb_v", V | {"schedule": "zb_v"}, "k3", modes="a"),
    Row("tp2 k3", "k3 tp", {"tp": 2}, "k3", modes="a"),
    Row("pp2 interleaved k3", "k3 pp", V | INTERLEAVED, "k3", modes="a"),
    Row("cp2 ring k3", "k3 cp", {"cp": 2}, "k3", modes="ab"),
    Row("cp2 ulysses k3", "k3 cp", {"cp": 2, "context_parallel": "ulysses"}, "k3", modes="a"),
    Row("cp2 ep2 muonclip k3", "k3 cp", {"cp": 2, "ep": 2}, "k3", "muonclip", "a"),
    Row("cp2 ring kl", "kl", {"cp": 2}, "kl", modes="ab"),
    Row("dp2 ep2 kl", "kl", DP2 | {"ep": 2}, "kl", modes="ab"),
    Row("pp2 zb_v kl", "kl", V | {"schedule": "zb_v"}, "kl", modes="a"),
    Row("dp2 ep2 muonclip k3", "ep", DP2 | {"ep": 2}, "k3", "muonclip", "a"),
    Row("dp2 muonclip", "dp muonclip", DP2, optimizer="muonclip"),
    Row("dp2 zero1", "zero1", DP2 | {"zero_stage": 1}, modes="bc"),
    Row("dp2 zero2", "zero2", DP2 | {"zero_stage": 2}, modes="bc"),
    Row(
        "dp2 zero2 host",
        "optimizer on the host",
        DP2 | {"zero_stage": 2, "optimizer_offload": True, "gradient_offload": True},
        modes="bc",
    ),
    Row("dp2 zero1 muonclip", "zero1", DP2 | {"zero_stage": 1}, "k2", "muonclip", "b"),
    Row("fsdp2 zero1", "fsdp2", FSDP | {"zero_stage": 1}, modes="a"),
    Row("fsdp2 zero2", "fsdp2", FSDP | {"zero_stage": 2}, modes="a"),
    Row("fsdp2 zero3", "zero3", FSDP | {"zero_stage": 3}),
    Row("fsdp2 zero3 llama", "zero3", FSDP | {"zero_stage": 3}, "llama", modes="a"),
    Row("fsdp2 zero3 muonclip", "zero3", FSDP | {"zero_stage": 3}, "k2", "muonclip", "ab"),
    Row(
        "fsdp2 zero3 full recompute",
        "zero3",
        FSDP | {"zero_stage": 3, "recompute": "full"},
        modes="a",
    ),
    Row("dp2 ep2", "ep", DP2 | {"ep": 2}),
    Row("dp2 ep2 zero1", "ep zero1", DP2 | {"ep": 2, "zero_stage": 1}, modes="bc"),
    Row("dp2 ep2 muonclip", "ep", DP2 | {"ep": 2}, optimizer="muonclip"),
    Row("fsdp2 ep2 zero3", "ep", FSDP | {"ep": 2, "zero_stage": 3}, modes="a"),
    Row("pp2 1f1b", "pp", {"pp": 2}),
    Row("pp2 1f1b llama", "pp", {"pp": 2}, "llama"),
    Row("pp2 gpipe", "gpipe", {"pp": 2, "schedule": "gpipe"}, modes="a"),
    Row("pp2 interleaved", "interleaved", V | {"schedule": "interleaved_1f1b"}, modes="a"),
    Row("pp2 overlap", "interleaved", V | {"schedule": "interleaved_1f1b_overlap"}, modes="a"),
    Row("pp2 zb_h1", "zb_h1", {"pp": 2, "schedule": "zb_h1"}, modes="a"),
    Row("pp2 zb_v", "zb_v", V | {"schedule": "zb_v"}),
    Row("pp2 zb_v muonclip", "zb_v", V | {"schedule": "zb_v"}, optimizer="muonclip"),
    Row("pp2 dualpipe_v", "dualpipe_v", V | {"schedule": "dualpipe_v"}, modes="a"),
    Row("pp2 full recompute", "recompute", {"pp": 2, "recompute": "full"}, modes="a"),
    Row(
        "pp2 zb_v selective recompute",
        "recompute",
        V | {"schedule": "zb_v", "recompute": "selective"},
        modes="ab",
    ),
    Row(
        "pp2 interleaved offload",
        "offload",
        V | {"schedule": "interleaved_1f1b", "activation_offload": True},
        modes="a",
    ),
    Row("tp2", "tp", {"tp": 2}),
    Row("tp2 llama", "tp", {"tp": 2}, "llama", modes="a"),
    Row("tp2 muonclip", "tp", {"tp": 2}, optimizer="muonclip", modes="a"),
    Row(
        "tp2 llama without sequences cut",
        "tp",
        {"tp": 2, "sequence_parallel": False},
        "llama",
        modes="a",
    ),
    Row("tp2 ep2", "tp ep", {"tp": 2, "ep": 2}, modes="a"),
    Row("tp2 etp2", "etp", {"tp": 2, "etp": 2}, modes="a"),
    Row("cp2 ring", "cp", {"cp": 2}),
    Row("cp2 ring llama", "cp", {"cp": 2}, "llama", modes="a"),
    Row("cp2 all_gather", "cp", {"cp": 2, "context_parallel": "all_gather"}, modes="a"),
    Row("cp2 ulysses", "cp", {"cp": 2, "context_parallel": "ulysses"}, modes="a"),
    Row("cp2 ep2 muonclip", "cp", {"cp": 2, "ep": 2}, optimizer="muonclip", modes="a"),
)
FOUR_RANKS: Final = (
    Row("dp4 ep2", "dp ep", {"dp_shard": 4, "ep": 2}, modes="a"),
    Row("dp4 ep4 zero1", "ep zero1", {"dp_shard": 4, "ep": 4, "zero_stage": 1}, modes="bc"),
    Row("dp2x2 ep2", "hybrid", DP2 | {"dp_replicate": 2, "ep": 2}, modes="a"),
    Row("fsdp2 2x2 zero3", "hybrid", FSDP | {"dp_replicate": 2, "zero_stage": 3}, modes="ab"),
    Row("pp4 1f1b llama", "pp", {"pp": 4}, "llama", modes="a"),
    Row("pp4 zb_h1", "zb_h1", {"pp": 4, "schedule": "zb_h1"}, modes="a"),
    Row("pp2 fsdp2 zero1", "pp fsdp2", FSDP | {"pp": 2, "zero_stage": 1}, modes="a"),
    Row(
        "pp2 ep2 dp2 zero1",
        "pp ep dp zero1",
        DP2 | {"pp": 2, "ep": 2, "zero_stage": 1},
        modes="bc",
    ),
    Row(
        "pp2 ep2 dp2 dualpipe_v muonclip",
        "pp ep dp muonclip",
        V | DP2 | {"ep": 2, "schedule": "dualpipe_v"},
        optimizer="muonclip",
        modes="ab",
    ),
    Row("tp2 pp2 zb_v", "tp pp", V | {"tp": 2, "schedule": "zb_v"}, modes="a"),
    Row("tp2 cp2 llama", "tp cp", {"tp": 2, "cp": 2}, "llama", modes="a"),
    Row("tp2 dp2 ep4", "tp dp ep", DP2 | {"tp": 2, "ep": 4}, modes="a"),
    Row(
        "tp2 dp2 ep2 zero1 muonclip",
        "tp dp ep",
        DP2 | {"tp": 2, "ep": 2, "zero_stage": 1},
        optimizer="muonclip",
        modes="b",
    ),
    Row("cp2 fsdp2 zero3", "cp fsdp2", FSDP | {"cp": 2, "zero_stage": 3}, modes="a"),
    Row("cp2 pp2 dualpipe_v", "cp pp", V | {"cp": 2, "schedule": "dualpipe_v"}, modes="a"),
    Row("pp2 cp2 interleaved k3", "k3", V | CP2 | INTERLEAVED, "k3", modes="a"),
    Row("cp4 ring k3", "k3", {"cp": 4}, "k3", modes="a"),
    Row("tp2 cp2 all_gather k3", "k3", CP2 | {"tp": 2}, "k3", modes="a"),
    Row(
        "pp2 fsdp2 zero1 interleaved k3",
        "k3",
        V | FSDP | INTERLEAVED | {"zero_stage": 1},
        "k3",
        modes="a",
    ),
)
ROWS: Final = ONE_RANK + TWO_RANKS + FOUR_RANKS


def chosen(world_size: int, *, everything: bool) -> list[tuple[Row, str]]:
    """Returns the rows of a world size with their modes; see `Row.kind`."""
    rows = [row for row in ROWS if row.world_size == world_size]
    if everything:
        return [(row, row.modes) for row in rows]
    return [
        (row, row.modes if row.kind in ALL_MODES else row.modes[0])
        for row in rows
        if is_first_of_kind(row)
    ]


def is_brief(row: Row) -> bool:
    """Whether few steps do in CI: delta attention is slow on CPUs, and its kind ran for STEPS."""
    return row.model in {"k3", "kl"} and not is_first_of_kind(row) and row.kind != "recompute"


def is_first_of_kind(row: Row) -> bool:
    """Whether no row of the same world size and kind stands before it."""
    return row is next(r for r in ROWS if (r.world_size, r.kind) == (row.world_size, row.kind))
