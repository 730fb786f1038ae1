"""From a probe to a cluster file: this machine as the planner sees it."""

from __future__ import annotations

import re
from typing import Final, Literal

from flopwright.report.probe import OperatorPoint, ProbeReport
from flopwright.simulator.calibration.fit_probe import (
    copy_bytes_per_s,
    fit_probe,
    peak_flops_per_s,
)
from flopwright.spec.cluster import ClusterSpec, Dtype, GpuSpec, LinkSpec, NodeSpec

# A link's numbers come from the plainest pattern that was measured.
NETWORK: Final = "network"
_PLAINEST: Final = ("send_recv", "broadcast", "all_gather", "all_reduce")


def link_name(probe: ProbeReport) -> str:
    """Returns the name of the link between the probed ranks."""
    return "intra_node" if probe.fingerprint.gpu else "loopback"


def cluster_from_probe(probe: ProbeReport) -> ClusterSpec:
    """Returns the probed machines as a cluster with a rank for each probed process.

    Peaks are the best matrix product measured, memory is the machine's divided by the ranks
    (a GPU's own where there is one); every number says that it was measured, and how.
    """
    where = probe.fingerprint
    kind: Literal["cuda", "cpu"] = "cuda" if where.gpu else "cpu"
    ranks = where.world_size // probe.nodes
    # Rounded down to a sixteenth of a GiB: a file for people, and not a byte too much.
    share = (probe.device_memory_bytes or where.memory_bytes // ranks) // 2**26 * 2**26
    host = where.memory_bytes // 2**26 * 2**26
    measured = f"measured by flopwright probe, {probe.created}, {ranks} ranks side by side"
    memory_source = (
        "reported by the driver"
        if probe.device_memory_bytes
        else f"the machine's memory, as the system reports it, over {ranks} ranks"
    )
    gpu = GpuSpec(
        name=_slug(where.gpu or where.processor),
        kind=kind,
        peak_flops_per_s=_text_rates(probe),
        hbm_bytes=f"{share} B",
        hbm_bytes_per_s=f"{copy_bytes_per_s(probe):.4g} B/s",
        launch_floor_s=f"{probe.host_floor_s:.3g} s",
        sources={
            "peak_flops": f"best matrix product, {measured}",
            "hbm": memory_source,
            "hbm_bandwidth": f"largest plain copy, read and write, {measured}",
            "launch_floor": f"an op on one element, {measured}",
        },
    )
    node = NodeSpec(
        gpus=ranks,
        gpu=gpu,
        link=_link(probe, measured, link_name(probe)),
        host_link=_host_link(probe, measured),
        host_bytes=f"{host} B",
        cores=where.num_cores,
    )
    if probe.nodes == 1:
        return ClusterSpec(name=f"local_{ranks}x_{gpu.name}", num_nodes=1, node=node)
    return ClusterSpec(
        name=f"{probe.nodes}x{ranks}_{gpu.name}",
        num_nodes=probe.nodes,
        node=node,
        network=_link(probe, measured, NETWORK),
    )


def _text_rates(probe: ProbeReport) -> dict[Dtype, str]:
    rates = peak_flops_per_s(probe)
    return {d: f"{rates[d] / 1e9:.4g} GFLOP/s" for d in _DTYPES if d in rates}


_DTYPES: Final[tuple[Dtype, ...]] = ("fp64", "fp32", "bf16", "fp16", "fp8")


def _link(probe: ProbeReport, measured: str, name: str) -> LinkSpec:
    curves = {
        c.collective: c for c in fit_probe(probe, link_name(probe)).collectives if c.link == name
    }
    found = next((curves[c] for c in _PLAINEST if c in curves), None)
    if found is None:
        rate, latency = copy_bytes_per_s(probe), probe.host_floor_s
        source = f"one rank has no partner: its memory's copy rate, {measured}"
    else:
        rate, latency = found.bytes_per_s, found.alpha_s
        source = f"{found.collective}, {measured}"
    return LinkSpec(
        name=name,
        bytes_per_s=f"{rate:.4g} B/s",
        latency_s=f"{latency:.3g} s",
        source=source,
    )


def _host_link(probe: ProbeReport, measured: str) -> LinkSpec | None:
    """Returns the link between a GPU and its host, None where no copy over it was measured."""
    points = [p for p in probe.operators if p.name == "to_host"]
    if not points:
        return None
    small, large = min(points, key=_nbytes), max(points, key=_nbytes)
    return LinkSpec(
        name="host",
        bytes_per_s=f"{_nbytes(large) / large.seconds:.4g} B/s",
        latency_s=f"{small.seconds_min:.3g} s",
        source=f"copy to pinned memory, {measured}",
    )


def _nbytes(point: OperatorPoint) -> float:
    return point.moved_bytes / 2  # read here, written there


def _slug(text: str) -> str:
    """Returns a name of lower-case words: "Intel(R) Xeon(R)" is "intel_xeon"."""
    plain = re.sub(r"\((r|tm)\)", "", text.lower())
    return "_".join(re.findall(r"[a-z0-9]+", plain)) or "processor"
