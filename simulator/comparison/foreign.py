"""Other programs' logs of a plan as measurements, so that they can be compared and learnt from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.plan.file import PlanFile
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.metrics import Fingerprint, LinkTime, Measurement, RankMetrics
from flopwright.report.records import FOREIGN
from flopwright.simulator.training.metrics import step_metrics
from flopwright.store.foreign.kineto import KinetoTrace
from flopwright.store.foreign.steps import StepsLog, step_seconds
from flopwright.store.foreign.text import iso_of

# First lines that are left out: allocators, compilation and caches are cold.
DISCARDED: Final = 3
# Which group of the mesh the traffic of a time class is among; the first that fits counts.
_GROUPS: Final = (
    ("tp", "tp_comm"),
    ("cp", "cp_comm"),
    ("ep", "ep_comm"),
    ("dp_cp", "dp_comm"),
    ("dp", "dp_comm"),
    ("edp", "dp_comm"),
    ("dp_shard_cp", "dp_comm"),
    ("pp", "pp_comm"),
    ("world", "dp_comm"),
)


def measurement_of_log(
    log: StepsLog,
    plan: PlanFile,
    *,
    stack: str = "",
    host: str = "",
    discard: int = DISCARDED,
) -> Measurement:
    """Returns a training log as the measurement of the plan that it ran.

    It was made when the log's last line was, or now where the log has no dates.

    Args:
        stack: what software ran it, as far as known; runs of one stack are compared and learnt
            from together.
        host: the machine's name, as far as known; each has a series of its own.
        discard: first lines left out, unless there are hardly more.

    Raises:
        InputError: a line's batch is not the plan's, or gives no step time.
    """
    scenario, split = plan.scenario, plan.parallel
    workload = scenario.workload
    timed = step_seconds(
        log,
        batch_sequences=workload.global_batch_size,
        tokens=float(workload.tokens_per_step),
        gpus=split.world_size,
    )
    kept = timed[discard:] if len(timed) > 2 * discard else timed[-max(1, len(timed) // 2) :]
    samples = tuple(seconds for _, seconds in kept)
    losses = tuple(line.loss for line in log.lines if line.loss is not None)
    every = {b.step - a.step for a, b in pairwise(log.lines)}
    notes = (f"{log.kind} log, a line every {min(every)} steps",) if every - {1} else ()
    return _measurement(
        plan,
        median(samples),
        samples,
        discarded=len(timed) - len(kept),
        software=f"{log.kind} {stack}".strip(),
        host=host,
        ended_s=log.ended_s,
        losses=losses,
        notes=notes,
    )


def measurement_of_traces(
    traces: Sequence[KinetoTrace], plan: PlanFile, *, stack: str = "", host: str = ""
) -> Measurement:
    """Returns profiled ranks as the measurement of the plan that they ran.

    Raises:
        InputError: a rank that the plan does not have, or one given twice.
    """
    split = plan.parallel
    found = [t.rank for t in traces]
    broken = [r for r in found if r >= split.world_size] or [
        r for r in found if found.count(r) > 1
    ]
    if broken or not traces:
        rule = "the plan has no such rank" if broken and max(found) >= split.world_size else (
            "a rank's trace is given twice" if broken else "no trace was given"
        )  # fmt: skip
        raise InputError(
            Violation(
                field="distributedInfo.rank",
                value=", ".join(map(str, broken[:4])),
                rule=rule,
                limit=f"0 to {split.world_size - 1}",
            )
        )
    samples = tuple(max(steps) for steps in zip(*(t.steps_s for t in traces), strict=False))
    metrics = tuple(_rank(t, split) for t in traces)
    return _measurement(
        plan,
        median(samples),
        samples,
        discarded=0,
        software=f"kineto {stack}".strip(),
        host=host,
        ended_s=max((t.ended_s for t in traces if t.ended_s is not None), default=None),
        notes=("profiled: steps take longer than without the profiler",),
        ranks=metrics,
        links=_links(traces, split),
    )


def with_kernels(measurement: Measurement, traces: Sequence[KinetoTrace]) -> Measurement:
    """Returns the measurement with what the profiler saw of kernels on its ranks.

    A profiled step is slower than others: kernels are brought to the seconds that the rank
    computed for when it was timed.
    """
    by_rank = {t.rank: t for t in traces}
    ranks = tuple(
        r.model_copy(update={"kernel_s": _scaled(by_rank[r.rank].kernel_s, r.time_s)})
        if r.rank in by_rank
        else r
        for r in measurement.ranks
    )
    return measurement.model_copy(update={"ranks": ranks})


def _scaled(kernel_s: dict[str, float], time_s: dict[str, float]) -> dict[str, float]:
    seen = {k: s for k, s in kernel_s.items() if k != "copy"}
    whole = sum(s for k, s in seen.items() if k != "optimizer")
    computed = sum(time_s.get(c, 0.0) for c in ("forward", "backward", "recompute"))
    factor = computed / whole if whole and computed else 1.0
    out = {k: s * factor for k, s in seen.items() if k != "optimizer"}
    if "optimizer" in time_s:
        out["optimizer"] = time_s["optimizer"]
    return out


def _rank(trace: KinetoTrace, plan: ParallelPlan) -> RankMetrics:
    time_s: dict[str, float] = {}
    for group, seconds in trace.groups_s.items():
        cls = _class_of(group, plan, trace.rank)
        time_s[cls] = time_s.get(cls, 0.0) + sum(seconds.values())
    if "copy" in trace.kernel_s:
        time_s["offload"] = trace.kernel_s["copy"]
    return RankMetrics(
        rank=trace.rank,
        stage=Mesh(plan).coordinates(trace.rank)["pp"],
        time_s=time_s,
        kernel_s={k: s for k, s in trace.kernel_s.items() if k != "copy"},
    )


def _class_of(group: tuple[int, ...], plan: ParallelPlan, rank: int) -> str:
    mesh = Mesh(plan)
    members = set(group)
    for name, cls in _GROUPS:
        whole = mesh.group_of(name, rank)
        if len(whole) > 1 and (members == set(whole) or (name == "pp" and members <= set(whole))):
            return cls
    return "dp_comm"


def _links(traces: Sequence[KinetoTrace], plan: ParallelPlan) -> tuple[LinkTime, ...]:
    longest: dict[tuple[str, tuple[int, ...]], float] = {}
    for trace in traces:
        for group, seconds in trace.groups_s.items():
            key = (_class_of(group, plan, trace.rank), group)
            if key[0] != "pp_comm" and len(group) > 1:
                longest[key] = max(longest.get(key, 0.0), sum(seconds.values()))
    return tuple(LinkTime(cls=c, ranks=r, seconds=s) for (c, r), s in sorted(longest.items()))


def _measurement(
    plan: PlanFile,
    step_time_s: float,
    samples: tuple[float, ...],
    *,
    discarded: int,
    software: str,
    host: str,
    ended_s: float | None,
    losses: tuple[float, ...] = (),
    notes: tuple[str, ...] = (),
    ranks: tuple[RankMetrics, ...] = (),
    links: tuple[LinkTime, ...] = (),
) -> Measurement:
    node = plan.scenario.cluster.node
    low, high = np.quantile(samples, (0.1, 0.9))
    unnamed = Measurement(
        id="",
        created="" if ended_s is None else iso_of(ended_s),
        plan_name=plan.name,
        plan=plan.to_data(),
        metrics=step_metrics(plan.scenario, plan.parallel.world_size, step_time_s),
        step_time_p10_s=float(low),
        step_time_p90_s=float(high),
        step_time_samples_s=samples,
        discarded_steps=discarded,
        fingerprint=Fingerprint(
            machine=FOREIGN,
            processor=node.gpu.name,
            num_cores=node.cores or 1,
            world_size=plan.parallel.world_size,
            threads_per_rank=1,
            memory_bytes=node.gpu.hbm_bytes,
            gpu=None if node.gpu.kind == "cpu" else node.gpu.name,
            python="",
            tool_version=software,
            host=host,
        ),
        losses=losses,
        mismatch=notes,
        ranks=ranks,
        links=links,
    )
    digest = hashlib.sha256(unnamed.model_dump_json().encode()).hexdigest()
    created = unnamed.created or datetime.now(UTC).isoformat(timespec="seconds")
    return unnamed.model_copy(update={"id": digest[:16], "created": created})
