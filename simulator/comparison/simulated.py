"""A simulated step as the measurement that a run of it would leave behind.

For trying out what looks at measurements, with slowdowns put in on purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from flopwright.plan.file import PlanFile
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.placement import stage_of_chunk
from flopwright.report.attribution import busy_by_rank
from flopwright.report.metrics import Fingerprint, LinkTime, Measurement, RankMetrics
from flopwright.report.trace import TraceEvent
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.comparison.parts import COMPUTE, predicted_parts
from flopwright.simulator.engine.perturb import Perturbation
from flopwright.simulator.engine.simulate import EngineName, SimulatedStep, simulate
from flopwright.simulator.training.predict import predict

# Traffic that a trace shows apart, and the group of ranks (plan/mesh.py) that it is between.
_GROUPS = {"dp_comm": "dp_cp", "ep_comm": "ep"}


def simulated_measurement(
    plan_file: PlanFile,
    calibration: Calibration,
    perturbation: Perturbation | None = None,
    *,
    samples: int = 8,
    engine: EngineName = "events",
    memory_factors: Mapping[str, float] | None = None,
    kernels: bool = False,
    name: str = "simulated",
) -> Measurement:
    """Returns what a run would record if the machine were as `calibration` says.

    Args:
        perturbation: how ranks differ, and the steps' jitter.
        samples: steps; times by class and rank are the first one's.
        memory_factors: multipliers of memory classes beside the calibration's own.
        kernels: whether a profiler saw kernels.
    """
    scenario, plan = plan_file.scenario, plan_file.parallel
    step = simulate(
        scenario, plan, calibration, engine=engine, perturbation=perturbation, samples=samples
    )
    foreseen, _ = predict(scenario, plan, calibration, name=name, whole_trace=False)
    middle = float(np.median(step.samples_s))
    scale = foreseen.metrics.step_time_s / middle
    speeds = ("tokens_per_s", "tokens_per_s_per_gpu", "model_flops_per_s_per_gpu", "mfu")
    factors = memory_factors or {}
    metrics = foreseen.metrics.model_copy(
        update={
            "step_time_s": middle,
            "time_s": {c: s * middle / step.step_time_s for c, s in step.time_s.items()},
            "memory_bytes": tuple(
                {c: round(n * factors.get(c, 1.0)) for c, n in stage.items()}
                for stage in foreseen.metrics.memory_bytes
            ),
            **{n: getattr(foreseen.metrics, n) * scale for n in speeds},
        }
    )
    ranks = _ranks(step, plan, calibration, plan_file, kernels=kernels)
    low, high = np.quantile(step.samples_s, (0.1, 0.9))
    identity = f"{plan_file.content_hash()} {calibration.id} {perturbation} {name} {factors}"
    return Measurement(
        id=hashlib.sha256(identity.encode()).hexdigest()[:16],
        created="2026-01-01T00:00:00+00:00",
        plan_name=name,
        plan=plan_file.to_data(),
        metrics=metrics,
        step_time_p10_s=float(low),
        step_time_p90_s=float(high),
        step_time_samples_s=step.samples_s,
        discarded_steps=0,
        fingerprint=_fingerprint(plan_file),
        ranks=ranks,
        links=_links(step.trace, plan, step.ranks),
    )


def _ranks(
    step: SimulatedStep,
    plan: ParallelPlan,
    calibration: Calibration,
    plan_file: PlanFile,
    *,
    kernels: bool,
) -> tuple[RankMetrics, ...]:
    parts = predicted_parts(plan_file.scenario, plan, calibration)
    alike = step.ranks == plan.pp and plan.world_size > plan.pp
    out = []
    for rank, time_s in busy_by_rank(step.trace).items():
        stage = rank if alike else Mesh(plan).coordinates(rank)["pp"]
        computed = sum(s for c, s in time_s.items() if c in COMPUTE)
        whole = sum(s for c, s in parts.time_s[stage].items() if c in COMPUTE)
        kernel_s = {k: s * computed / whole for k, s in parts.kernel_s[stage].items()}
        first = _first_rank(plan, stage) if alike else rank
        out.append(
            RankMetrics(
                rank=first, stage=stage, time_s=time_s, kernel_s=kernel_s if kernels else {}
            )
        )
    return tuple(out)


def _first_rank(plan: ParallelPlan, stage: int) -> int:
    return stage * plan.dp * plan.cp * plan.tp


def _links(trace: Sequence[TraceEvent], plan: ParallelPlan, ranks: int) -> tuple[LinkTime, ...]:
    """Returns the traffic that the trace shows; where replicas are alike, of the first one."""
    alike = ranks == plan.pp and plan.world_size > plan.pp
    mesh = Mesh(plan)
    found: dict[tuple[str, tuple[int, ...]], dict[int, list[TraceEvent]]] = {}
    for event in trace:
        rank = _first_rank(plan, event.rank) if alike else event.rank
        if event.cls == "pp_comm":
            key: tuple[str, tuple[int, ...]] = (event.cls, (_sender(plan, event.name, rank), rank))
        elif event.cls in _GROUPS:
            world = event.name == "NORM"
            key = (event.cls, mesh.group_of("world" if world else _GROUPS[event.cls], rank))
        else:
            continue
        found.setdefault(key, {}).setdefault(rank, []).append(event)
    return tuple(_link(*key, by_rank) for key, by_rank in found.items())


def _link(
    cls: str, ranks: tuple[int, ...], by_rank: Mapping[int, Sequence[TraceEvent]]
) -> LinkTime:
    """Returns a link's seconds, of the member that they are longest for."""
    longest = max(by_rank.values(), key=lambda events: sum(e.end_s - e.start_s for e in events))
    return LinkTime(
        cls=cls,
        ranks=ranks,
        seconds=sum(e.end_s - e.start_s for e in longest),
        nbytes=float(sum(e.nbytes for e in longest)),
        count=float(len(longest)),
    )


def _sender(plan: ParallelPlan, name: str, receiver: int) -> int:
    """Returns who sent what a rank received as "RECV_F(chunk,micro-batch)"."""
    chunk = int(name.partition("(")[2].split(",")[0])
    here = stage_of_chunk(plan, chunk)
    there = stage_of_chunk(plan, chunk + (-1 if name.startswith("RECV_F") else 1))
    return receiver + (there - here) * plan.dp * plan.cp * plan.tp


def _fingerprint(plan_file: PlanFile) -> Fingerprint:
    node = plan_file.scenario.cluster.node
    return Fingerprint(
        machine="simulated",
        processor=node.gpu.name,
        num_cores=node.cores or 1,
        world_size=plan_file.parallel.world_size,
        threads_per_rank=1,
        memory_bytes=node.gpu.hbm_bytes,
        gpu=None if node.gpu.kind == "cpu" else node.gpu.name,
        python="",
        tool_version="0",
    )
