"""What would make a plan faster: each resource better by a tenth, and without a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.calibration.model import Calibration, CollectiveCurve, EfficiencyCurve
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.cluster import ClusterSpec, LinkSpec
from flopwright.spec.scenario import Scenario

Role = Literal["compute", "memory bandwidth", "launch floor", "node link", "network", "host link"]
STEP: Final = 1.1
# So much faster that what is left of the resource's time is nothing.
UNLIMITED: Final = 1e9
Hardware = tuple[ClusterSpec, Calibration]
Change = Callable[[ClusterSpec, Calibration, float], Hardware]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What one resource holds back.

    Attributes:
        name: the link's own name; "" for the processor's resources.
        share: of the step that would go if the resource were infinitely fast. Another
            resource that hides behind this one, and would then show, is not counted.
        tenth: of the step that goes when the resource gets 10 % faster.
    """

    role: Role
    name: str = ""
    share: float
    tenth: float


def sensitivities(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration
) -> tuple[Sensitivity, ...]:
    """Returns what each resource of the cluster holds back, priced in closed form."""
    one = Candidates.from_plans((plan,))

    def step_s(change: Change, factor: float) -> float:
        cluster, better = change(scenario.cluster, calibration, factor)
        changed = scenario.model_copy(update={"cluster": cluster})
        return float(evaluate(changed, one, better).step_time_s[0])

    base = step_s(_compute, 1.0)
    return tuple(
        Sensitivity(
            role=role,
            name=name,
            share=1 - step_s(change, UNLIMITED) / base,
            tenth=1 - step_s(change, STEP) / base,
        )
        for role, name, change in _resources(scenario.cluster)
    )


def _resources(cluster: ClusterSpec) -> list[tuple[Role, str, Change]]:
    """Returns the resources by role: two links may have one name, or that of another thing."""
    found: list[tuple[Role, str, Change]] = [
        ("compute", "", _compute),
        ("memory bandwidth", "", _memory),
        ("launch floor", "", _launch),
        ("node link", cluster.node.link.name, _node_link),
    ]
    if cluster.network is not None:
        found.append(("network", cluster.network.name, _network))
    if cluster.node.host_link is not None:
        found.append(("host link", cluster.node.host_link.name, _host_link))
    return found


def _curves(
    calibration: Calibration, better: Callable[[EfficiencyCurve], dict[str, float]]
) -> Calibration:
    curves = tuple(c.model_copy(update=better(c)) for c in calibration.curves)
    return calibration.model_copy(update={"curves": curves})


def _gpu(cluster: ClusterSpec, update: dict[str, object]) -> ClusterSpec:
    gpu = cluster.node.gpu.model_copy(update=update)
    return cluster.model_copy(update={"node": cluster.node.model_copy(update={"gpu": gpu})})


def _compute(cluster: ClusterSpec, calibration: Calibration, factor: float) -> Hardware:
    peaks = {k: v * factor for k, v in cluster.node.gpu.peak_flops_per_s.items()}

    def better(c: EfficiencyCurve) -> dict[str, float]:
        peak = c.peak_flops_per_s
        return {} if peak is None else {"peak_flops_per_s": peak * factor}

    return _gpu(cluster, {"peak_flops_per_s": peaks}), _curves(calibration, better)


def _memory(cluster: ClusterSpec, calibration: Calibration, factor: float) -> Hardware:
    def better(c: EfficiencyCurve) -> dict[str, float]:
        return {} if c.bytes_per_s is None else {"bytes_per_s": c.bytes_per_s * factor}

    wider = cluster.node.gpu.hbm_bytes_per_s * factor
    return _gpu(cluster, {"hbm_bytes_per_s": wider}), _curves(calibration, better)


def _launch(cluster: ClusterSpec, calibration: Calibration, factor: float) -> Hardware:
    shorter = cluster.node.gpu.launch_floor_s / factor
    better = _curves(calibration, lambda c: {"floor_s": c.floor_s / factor})
    better = better.model_copy(update={"host_floor_s": better.host_floor_s / factor})
    return _gpu(cluster, {"launch_floor_s": shorter}), better


def _wider(link: LinkSpec, factor: float) -> LinkSpec:
    faster = {"bytes_per_s": link.bytes_per_s * factor, "latency_s": link.latency_s / factor}
    return link.model_copy(update=faster)


def _collectives(
    calibration: Calibration, applies: Callable[[CollectiveCurve], bool], factor: float
) -> Calibration:
    curves = tuple(
        c.model_copy(update={"bytes_per_s": c.bytes_per_s * factor, "alpha_s": c.alpha_s / factor})
        if applies(c)
        else c
        for c in calibration.collectives
    )
    return calibration.model_copy(update={"collectives": curves})


def _node_link(cluster: ClusterSpec, calibration: Calibration, factor: float) -> Hardware:
    link = cluster.node.link
    node = cluster.node.model_copy(update={"link": _wider(link, factor)})
    # In one node every measured curve is of its link, whatever the name (collectives/times.py).
    alone = cluster.num_nodes == 1
    better = _collectives(calibration, lambda c: alone or c.link == link.name, factor)
    return cluster.model_copy(update={"node": node}), better


def _network(cluster: ClusterSpec, calibration: Calibration, factor: float) -> Hardware:
    network = cluster.network
    assert network is not None
    alone = cluster.num_nodes == 1
    better = _collectives(calibration, lambda c: not alone and c.link == network.name, factor)
    return cluster.model_copy(update={"network": _wider(network, factor)}), better


def _host_link(cluster: ClusterSpec, calibration: Calibration, factor: float) -> Hardware:
    assert cluster.node.host_link is not None
    # No collective crosses it, whatever its name.
    node = cluster.node.model_copy(update={"host_link": _wider(cluster.node.host_link, factor)})
    return cluster.model_copy(update={"node": node}), calibration
