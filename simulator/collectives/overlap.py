"""What a collective takes from compute that runs beside it: streaming multiprocessors."""

from __future__ import annotations

from flopwright.simulator.collectives.curves import load_link
from flopwright.spec.cluster import ClusterSpec


def compute_slowdown(cluster: ClusterSpec, curve: str) -> float:
    """Returns the time of a kernel beside a collective over its time alone, at least 1.

    A kernel that fills the GPU is left 1 - sms / gpu_sms of it. Known of DeepEP's dispatch and
    combine ("moe_dispatch", "moe_combine": 20 of 132 on an H100, a tenth to a sixth); 1 where
    the link's file does not say, as of NCCL, whose channels the tables do not record.

    Raises:
        InputError: the node's link names curves that there are not.
    """
    if not cluster.node.link.curve:
        return 1.0
    link = load_link(cluster.node.link.curve)
    taken = link.sms.get(curve, 0.0)
    if not link.gpu_sms or taken >= link.gpu_sms:
        return 1.0
    return link.gpu_sms / (link.gpu_sms - taken)
