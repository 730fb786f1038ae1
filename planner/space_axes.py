"""What an axis that a scenario's `search` leaves empty is tried with: the bounds of the space.

Left out on purpose, unless a scenario or a caller names it: GPipe (1F1B takes the same time
and holds fewer micro-batches), tensor parallelism beyond a node's links, tensor parallelism
without sequence parallelism, context parallelism that leaves a rank less than
MIN_CONTEXT_TOKENS. A cluster of CPUs, which only the executor's small runs use, is searched
over plain 1F1B pipelines without finer recompute lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flopwright.errors import divisors
from flopwright.plan.parallel import ScheduleName
from flopwright.plan.schedules.placement import CHUNKS_PER_STAGE
from flopwright.simulator.training.candidates import CONTEXTS, RECOMPUTES, SCHEDULES
from flopwright.spec.cluster import NodeSpec
from flopwright.spec.scenario import Scenario

MAX_VPP: Final = 4
MAX_MICRO_BATCH_SIZE: Final = 16
MIN_CONTEXT_TOKENS: Final = 4096
_PLAIN: Final[tuple[ScheduleName, ...]] = ("1f1b", "interleaved_1f1b")
_FILLED: Final[tuple[ScheduleName, ...]] = ("zb_h1", "zb_v", "dualpipe_v")
# Tried with one chunk a stage among other schedules: with several it is rarely run.
_ONE_CHUNK: Final[frozenset[ScheduleName]] = frozenset({"zb_h1"})
_K2: Final = ("norm", "swiglu", "mla_up")
# Lists beside "selective", which is Kimi K2's without the experts' second products: attention
# alone (arXiv 2205.05198), with those products, or a whole dense feed-forward block.
_DENSE_LISTS: Final = (("core_attn",), ("norm", "mlp"))
_MOE_LISTS: Final = (("core_attn",), (*_K2, "moe_down"))
AS_TP: Final = 0  # etp: as many ranks as tp
LIGHT_ENDS, BALANCED = 1, 2  # split: how layers are spread over chunks (0: evenly)
HALF: Final = -2  # recompute_layers: the first half of each chunk
_NONE: Final = -1
_FULL, _SELECTIVE = RECOMPUTES.index("full"), RECOMPUTES.index("selective")
Fixed = dict[str, int]


@dataclass(frozen=True, slots=True)
class Policy:
    """What memory policy a plan has; recompute_tags is an index into the space's lists."""

    recompute: int
    recompute_tags: int
    recompute_layers: int
    fp8_activations: int
    activation_offload: int
    optimizer_offload: int
    gradient_offload: int
    parameter_offload: int
    fused_loss: int


def shape_axes(scenario: Scenario, fixed: Fixed) -> dict[str, Sequence[int]]:
    """Returns the values tried of every axis that cuts the model or orders its work."""
    search, model, cluster = scenario.search, scenario.model, scenario.cluster
    gpus, moe, gpu_kind = cluster.num_gpus, model.moe, cluster.node.gpu.kind
    batch = scenario.workload.global_batch_size
    values: dict[str, Sequence[int]] = {
        "tp": search.tp or _tensor_parallel(cluster.node, model.common_heads),
        "pp": search.pp or [d for d in divisors(gpus) if d <= model.num_layers],
        "vpp": search.vpp or range(1, min(MAX_VPP, model.num_layers) + 1),
        "cp": search.cp or _context_parallel(scenario),
        "context_parallel": _contexts(scenario),
        "ep": search.ep or (divisors(math.gcd(moe.num_experts, gpus)) if moe else (1,)),
        "etp": search.etp or ((1, AS_TP) if moe and gpu_kind != "cpu" else (1,)),
        "micro_batch_size": search.micro_batch_size
        or [d for d in divisors(batch) if d <= MAX_MICRO_BATCH_SIZE],
        "zero_stage": search.zero_stage,
        "schedule": [SCHEDULES.index(s) for s in _schedules(scenario)],
        "sequence_parallel": [int(s) for s in search.sequence_parallel] or (1,),
        "split": (0, LIGHT_ENDS) if gpu_kind == "cpu" else (0, BALANCED),
        "world": world_sizes(scenario),
    }
    values |= {name: (fixed[name],) for name in values if name in fixed}
    return {name: list(dict.fromkeys(column)) for name, column in values.items()}


def schedules_with_chunks(values: dict[str, Sequence[int]]) -> list[tuple[int, int]]:
    """Returns the pairs (schedule, vpp) that go together; all pairs where none do."""
    every = [(s, v) for s in values["schedule"] for v in values["vpp"]]
    several = len(values["schedule"]) > 1 and 1 in values["vpp"]
    fit = []
    for schedule, vpp in every:
        least, most = CHUNKS_PER_STAGE[SCHEDULES[schedule]]
        if several and SCHEDULES[schedule] in _ONE_CHUNK:
            most = 1
        if vpp >= least and (not most or vpp <= most):
            fit.append((schedule, vpp))
    return fit or every


def policies(scenario: Scenario, fixed: Fixed, tags: Sequence[tuple[str, ...]]) -> list[Policy]:
    """Returns the memory policies tried.

    Args:
        tags: the lists that `recompute_tags` counts in (recompute_lists).
    """
    search, cluster = scenario.search, scenario.cluster
    gpu = cluster.node.gpu
    cuda = gpu.kind != "cpu"
    moves = (0, 1) if cuda and cluster.node.host_link is not None else (0,)
    sharded = max(search.zero_stage, default=0)

    def flags(name: str, default: Sequence[int]) -> Sequence[int]:
        if name in fixed:
            return (fixed[name],)
        given: tuple[bool, ...] = getattr(search, name)
        return list(dict.fromkeys(int(v) for v in given)) or default

    fp8 = flags("fp8_activations", (0, 1) if cuda and "fp8" in gpu.peak_flops_per_s else (0,))
    return [
        Policy(*again, fp8_on, activations, optimizer, gradients, weights, fused)
        for again in _recomputes(scenario, fixed, tags)
        for fp8_on in fp8
        for activations in flags("activation_offload", moves)
        for optimizer in flags("optimizer_offload", moves)
        for gradients in flags("gradient_offload", moves if sharded >= 2 else (0,))
        for weights in flags("parameter_offload", moves if sharded >= 3 else (0,))
        for fused in flags("fused_loss", (0,))
    ]


def recompute_lists(scenario: Scenario, given: tuple[str, ...] | None) -> list[tuple[str, ...]]:
    """Returns the lists that "selective" is tried with beside its own.

    Args:
        given: the one that every plan must have; None leaves the choice open.
    """
    if given is not None:
        return [given] if given else []
    search, model = scenario.search, scenario.model
    if search.recompute_tags is not None:
        return list(dict.fromkeys(t for t in search.recompute_tags if t))
    if scenario.cluster.node.gpu.kind == "cpu":
        return []
    return list(_MOE_LISTS if model.moe is not None else _DENSE_LISTS)


def world_sizes(scenario: Scenario) -> list[int]:
    """Returns the GPU counts tried: all of them, or halves of the cluster too."""
    gpus = scenario.cluster.num_gpus
    if scenario.objective in ("time", "headroom"):
        return [gpus]
    return [gpus >> k for k in range(gpus.bit_length()) if gpus % (1 << k) == 0]


def _recomputes(
    scenario: Scenario, fixed: Fixed, tags: Sequence[tuple[str, ...]]
) -> list[tuple[int, int, int]]:
    """Returns (recompute, list, layers) of every way to make activations again."""
    search = scenario.search
    kinds = [RECOMPUTES.index(r) for r in search.recompute]
    if "recompute" in fixed:
        kinds = [fixed["recompute"]]
    out = []
    for kind in dict.fromkeys(kinds):
        lists = [_NONE]
        if kind == _SELECTIVE and tags:
            only = "recompute_tags" in fixed
            lists = [*([] if only else [_NONE]), *range(len(tags))]
        whole = [fixed.get("recompute_layers", _NONE)]
        depths = _depths(scenario, fixed) if kind == _FULL else whole
        out += [(kind, listed, depth) for listed in lists for depth in depths]
    return out


def _depths(scenario: Scenario, fixed: Fixed) -> list[int]:
    if "recompute_layers" in fixed:
        return [fixed["recompute_layers"]]
    given = scenario.search.recompute_layers
    if given is not None:
        return [_NONE, *dict.fromkeys(given)]
    return [_NONE] if scenario.cluster.node.gpu.kind == "cpu" else [_NONE, HALF]


def _schedules(scenario: Scenario) -> Sequence[ScheduleName]:
    if scenario.search.schedule:
        return scenario.search.schedule
    if scenario.cluster.node.gpu.kind == "cpu":
        return _PLAIN
    overlap: tuple[ScheduleName, ...] = ("interleaved_1f1b_overlap",)
    return (*_PLAIN, *(overlap if scenario.model.moe is not None else ()), *_FILLED)


def _contexts(scenario: Scenario) -> list[int]:
    given = scenario.search.context_parallel
    return [CONTEXTS.index(c) for c in given] if given else list(range(len(CONTEXTS)))


def _context_parallel(scenario: Scenario) -> list[int]:
    """Returns powers of two that divide the cluster and leave a rank tokens enough."""
    gpus, tokens = scenario.cluster.num_gpus, scenario.workload.seq_len
    if scenario.cluster.node.gpu.kind == "cpu":
        return [1]
    sizes = [1 << k for k in range(gpus.bit_length())]
    return [
        c
        for c in sizes
        if c == 1 or (gpus % c == 0 and tokens % c == 0 and tokens // c >= MIN_CONTEXT_TOKENS)
    ]


def _tensor_parallel(node: NodeSpec, heads: int) -> list[int]:
    """Returns the head counts' divisors that divide a node or fill nodes of one NVLink domain."""
    return [
        tp
        for tp in divisors(heads)
        if node.gpus % tp == 0 or (tp % node.gpus == 0 and tp <= node.domain_gpus)
    ]
