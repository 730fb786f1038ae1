"""Seconds until the engines hold the new weights, by path, and what each part of them is.

A copy travels in n pieces (buckets). With s_1..s_k seconds a piece in the k parts of the way
(host copy, wire, loader), a serial transfer takes n * (s_1 + ... + s_k); a pipelined one
n * max(s) + the other parts once. The switch of a GPU between training and generation
(`switch_seconds`) is another time than the sync and stands apart from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from flopwright.errors import InputError, Violation
from flopwright.spec.cluster import ClusterSpec, LinkSpec
from flopwright.spec.rollouts.weight_sync import WeightSyncPlan

# Share of a link's paper rate that a stream of buckets reaches; the links of a catalog node
# carry paper rates. NCCL broadcast inside a node and RDMA writes reach 0.75 to 0.9 of them.
WIRE_SHARE = 0.8
# Bytes written and read by the loader's copy of one byte that it keeps.
_COPY_TRAFFIC = 2.0
_COPY_SHARE = 0.5  # of the memory bandwidth, for copies of single tensors
# A change is sent as a value and where it belongs: a bf16 value needs a 4-byte index.
DELTA_OVERHEAD = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTime:
    """Seconds of one synchronisation.

    Attributes:
        sync_s: all of it; copy_s, wire_s, load_s: host copies, network, loader, each alone;
            gather_s: making full tensors of shards; fixed_s: what no byte causes.
        lower_bound_s: the same bytes at the rates on paper, all parts at once: no software
            can be faster.
    """

    sync_s: float
    copy_s: float
    wire_s: float
    load_s: float
    gather_s: float
    fixed_s: float
    lower_bound_s: float


def sync_time(plan: WeightSyncPlan, cluster: ClusterSpec) -> SyncTime:
    """Returns the seconds of one synchronisation on a cluster.

    Raises:
        InputError: a path that needs a link which the cluster does not have.
    """
    wire_rate, least = _wire(plan, cluster)
    moved = plan.moved_bytes * (DELTA_OVERHEAD if plan.changed_share < 1 else 1.0)
    moved = min(moved, float(plan.weight_bytes))
    copy_s = _host_copies(plan, cluster, moved)
    wire_s = moved / wire_rate
    gather_s = _gather(plan, cluster)
    load_s = 0.0 if plan.path == "relay" else _load(plan, cluster, moved)
    parts = [s for s in (copy_s, wire_s, load_s) if s > 0]
    fixed = plan.fixed_s + plan.bucket_s * plan.pieces
    body = sum(parts)
    if plan.pipelined and parts:
        body = max(parts) + (sum(parts) - max(parts)) / plan.pieces
    return SyncTime(
        sync_s=fixed + gather_s + body,
        copy_s=copy_s,
        wire_s=wire_s,
        load_s=load_s,
        gather_s=gather_s,
        fixed_s=fixed,
        lower_bound_s=moved / least,
    )


def _wire(plan: WeightSyncPlan, cluster: ClusterSpec) -> tuple[float, float]:
    """Returns the rate at which a full copy travels, as used and on paper, bytes/s."""
    if plan.rate_bytes_per_s is not None:
        return plan.rate_bytes_per_s, plan.rate_bytes_per_s
    node = cluster.node
    inside = plan.senders + plan.receivers <= node.domain_gpus or (
        plan.source != "gpu" and plan.receivers <= node.domain_gpus
    )
    engines = plan.receivers // plan.engine_ranks
    if plan.path == "storage":
        link = _need(cluster.storage, "cluster.storage", "the shared file system")
        return link.bytes_per_s * WIRE_SHARE, link.bytes_per_s
    if plan.path == "relay":
        link = _need(cluster.network, "cluster.network", "the way to the relay")
        return link.bytes_per_s * WIRE_SHARE, link.bytes_per_s * node.gpus
    link = node.link if inside else _need(cluster.network, "cluster.network", "the network")
    if plan.path == "p2p":
        # Each sender writes its part to every engine; each rank receives its own part.
        out, into = plan.senders / engines, float(plan.engine_ranks)
        return link.bytes_per_s * WIRE_SHARE * min(out, into), link.bytes_per_s * min(out, into)
    if plan.path == "gather_broadcast" or inside:
        return link.bytes_per_s * WIRE_SHARE, link.bytes_per_s
    # Ranks of a node take turns at receiving over their adapters and pass it on by NVLink.
    rate = min(node.link.bytes_per_s, link.bytes_per_s * min(node.gpus, plan.receivers))
    return rate * WIRE_SHARE, rate


def _host_copies(plan: WeightSyncPlan, cluster: ClusterSpec, moved: float) -> float:
    """Returns the seconds of copies between host and GPUs, every holder its part at once."""
    if plan.source == "gpu":
        return 0.0
    link = _need(cluster.node.host_link, "cluster.node.host_link", "the host's memory")
    if plan.source == "remote":
        link = _need(cluster.network, "cluster.network", "the network")
    holders = min(plan.senders, plan.receivers) if plan.path == "broadcast" else plan.senders
    return moved / holders / (link.bytes_per_s * WIRE_SHARE)


def _gather(plan: WeightSyncPlan, cluster: ClusterSpec) -> float:
    """Returns the seconds of making full tensors of shards, all stages side by side."""
    if plan.path not in {"gather_broadcast", "p2p"} or plan.shard_group <= 1:
        return 0.0
    node = cluster.node
    link = node.link
    if plan.shard_group > node.domain_gpus:
        link = _need(cluster.network, "cluster.network", "the network")
    share = (plan.shard_group - 1) / plan.shard_group
    return plan.weight_bytes / plan.stages * share / (link.bytes_per_s * WIRE_SHARE)


def _load(plan: WeightSyncPlan, cluster: ClusterSpec, moved: float) -> float:
    """Returns the seconds of the engines' loaders: tensors one by one, each rank its part."""
    bandwidth = cluster.node.gpu.hbm_bytes_per_s * _COPY_SHARE
    return plan.tensors * plan.tensor_s + moved / plan.engine_ranks * _COPY_TRAFFIC / bandwidth


def _need(link: LinkSpec | None, field: str, what: str) -> LinkSpec:
    if link is None:
        raise InputError(
            Violation(field=field, rule=f"the weights travel over {what}, and there is none",
                      nearest_fix=f"give {field}")
        )  # fmt: skip
    return link


def switch_seconds(state_bytes_per_gpu: float, cluster: ClusterSpec, wake_s: float = 0.0) -> float:
    """Returns the seconds in which one GPU's state moves to or from the host, plus `wake_s`.

    Args:
        state_bytes_per_gpu: weights, gradients or optimizer state that leave or come.
        wake_s: what the engine needs to start up again (graphs, cache).
    """
    if state_bytes_per_gpu <= 0:
        return wake_s
    link = _need(cluster.node.host_link, "cluster.node.host_link", "the host's memory")
    return state_bytes_per_gpu / (link.bytes_per_s * WIRE_SHARE) + wake_s
