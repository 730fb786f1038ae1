"""What would make a plan faster: each resource a tenth better, the step priced again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.calibration.model import Calibration, EfficiencyCurve
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.cluster import ClusterSpec, LinkSpec
from flopwright.spec.scenario import Scenario

STEP: Final = 1.1
# What a step that scales with a resource as a whole gains from STEP.
FULL_GAIN: Final = 1 - 1 / STEP
Change = Callable[[ClusterSpec, Calibration], tuple[ClusterSpec, Calibration]]


def sensitivities(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration
) -> dict[str, float]:
    """Returns, by resource, the share of the step saved when it gets 10 % better, times 10.

    1 means the whole step scales with the resource, 0 that it does not matter. Resources:
    "compute" (FLOP/s), "memory bandwidth", "launch floor" (shorter), and the links by name.
    """
    one = Candidates.from_plans((plan,))
    base = float(evaluate(scenario, one, calibration).step_time_s[0])
    out = {}
    for name, change in _changes(scenario.cluster).items():
        cluster, better = change(scenario.cluster, calibration)
        changed = scenario.model_copy(update={"cluster": cluster})
        faster = float(evaluate(changed, one, better).step_time_s[0])
        out[name] = (1 - faster / base) / FULL_GAIN
    return out


def _changes(cluster: ClusterSpec) -> dict[str, Change]:
    changes: dict[str, Change] = {
        "compute": _compute,
        "memory bandwidth": _memory,
        "launch floor": _launch,
        cluster.node.link.name: _node_link,
    }
    if cluster.network is not None:
        changes[cluster.network.name] = _network
    if cluster.node.host_link is not None:
        changes[cluster.node.host_link.name] = _host_link
    return changes


def _curves(
    calibration: Calibration, better: Callable[[EfficiencyCurve], dict[str, float]]
) -> Calibration:
    curves = tuple(c.model_copy(update=better(c)) for c in calibration.curves)
    return calibration.model_copy(update={"curves": curves})


def _gpu(cluster: ClusterSpec, update: dict[str, object]) -> ClusterSpec:
    gpu = cluster.node.gpu.model_copy(update=update)
    return cluster.model_copy(update={"node": cluster.node.model_copy(update={"gpu": gpu})})


def _compute(cluster: ClusterSpec, calibration: Calibration) -> tuple[ClusterSpec, Calibration]:
    peaks = {k: v * STEP for k, v in cluster.node.gpu.peak_flops_per_s.items()}

    def better(c: EfficiencyCurve) -> dict[str, float]:
        return (
            {} if c.peak_flops_per_s is None else {"peak_flops_per_s": c.peak_flops_per_s * STEP}
        )

    return _gpu(cluster, {"peak_flops_per_s": peaks}), _curves(calibration, better)


def _memory(cluster: ClusterSpec, calibration: Calibration) -> tuple[ClusterSpec, Calibration]:
    def better(c: EfficiencyCurve) -> dict[str, float]:
        return {} if c.bytes_per_s is None else {"bytes_per_s": c.bytes_per_s * STEP}

    wider = cluster.node.gpu.hbm_bytes_per_s * STEP
    return _gpu(cluster, {"hbm_bytes_per_s": wider}), _curves(calibration, better)


def _launch(cluster: ClusterSpec, calibration: Calibration) -> tuple[ClusterSpec, Calibration]:
    shorter = cluster.node.gpu.launch_floor_s / STEP
    better = _curves(calibration, lambda c: {"floor_s": c.floor_s / STEP})
    better = better.model_copy(update={"host_floor_s": better.host_floor_s / STEP})
    return _gpu(cluster, {"launch_floor_s": shorter}), better


def _wider(link: LinkSpec) -> LinkSpec:
    faster = {"bytes_per_s": link.bytes_per_s * STEP, "latency_s": link.latency_s / STEP}
    return link.model_copy(update=faster)


def _collectives(calibration: Calibration, link: str) -> Calibration:
    curves = tuple(
        c.model_copy(update={"bytes_per_s": c.bytes_per_s * STEP, "alpha_s": c.alpha_s / STEP})
        if c.link == link
        else c
        for c in calibration.collectives
    )
    return calibration.model_copy(update={"collectives": curves})


def _node_link(cluster: ClusterSpec, calibration: Calibration) -> tuple[ClusterSpec, Calibration]:
    node = cluster.node.model_copy(update={"link": _wider(cluster.node.link)})
    better = _collectives(calibration, cluster.node.link.name)
    return cluster.model_copy(update={"node": node}), better


def _network(cluster: ClusterSpec, calibration: Calibration) -> tuple[ClusterSpec, Calibration]:
    assert cluster.network is not None
    better = _collectives(calibration, cluster.network.name)
    return cluster.model_copy(update={"network": _wider(cluster.network)}), better


def _host_link(cluster: ClusterSpec, calibration: Calibration) -> tuple[ClusterSpec, Calibration]:
    assert cluster.node.host_link is not None
    node = cluster.node.model_copy(update={"host_link": _wider(cluster.node.host_link)})
    better = _collectives(calibration, cluster.node.host_link.name)
    return cluster.model_copy(update={"node": node}), better
