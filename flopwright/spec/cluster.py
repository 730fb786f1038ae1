"""What a cluster is: processors, memory, links and prices. Every number has a source.

Bandwidths are per direction and per GPU; peaks are dense. A "gpu" here is whatever one
rank computes on: on a machine without GPUs a rank's processor is a share of its cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from flopwright.spec.base import Spec
from flopwright.units import (
    Bytes,
    BytesPerS,
    FlopsPerS,
    HbmBytes,
    Seconds,
    UsdPerHour,
    Watts,
    format_bytes,
    format_bytes_per_s,
    format_flops_per_s,
    show_seconds,
)

Dtype = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
# What a datasheet has a peak for: tf32 and fp4 are formats of the multiply, not of a tensor.
PeakDtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4"]
DTYPE_BYTES: dict[str, int] = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int64": 8,
    "int32": 4,
}


# Bounds that no machine crosses: inside them every figure derived is finite and above zero.
MAX_GPUS: Final = 10_000_000
_RATE: Final = (1.0, 1e21)
_MEMORY_BYTES: Final = (2**20, 2**60)
_MAX_DELAY_S: Final = 3600.0


def _within(
    field: str, value: float, bounds: tuple[float, float], show: Callable[[float], str]
) -> None:
    low, high = bounds
    if not low <= value <= high:
        raise ValueError(f"{field} must be from {show(low)} to {show(high)}, not {show(value)}")


class GpuSpec(Spec):
    """One processor that a rank computes on.

    Attributes:
        kind: "cuda", "rocm" or "cpu".
        peak_flops_per_s: dense peak by dtype.
        hbm_bytes: memory of one processor; hbm_bytes_per_s its bandwidth.
        reserved_bytes: what the driver, context and communication library keep.
        sources: where each number comes from.
    """

    name: str = Field(min_length=1)
    kind: Literal["cuda", "rocm", "cpu"] = "cuda"
    peak_flops_per_s: dict[PeakDtype, FlopsPerS] = Field(alias="peak_flops", min_length=1)
    hbm_bytes: HbmBytes = Field(alias="hbm")
    hbm_bytes_per_s: BytesPerS = Field(alias="hbm_bandwidth")
    reserved_bytes: Bytes = Field(default=0, alias="reserved")
    power_watts: Watts | None = Field(default=None, alias="power")
    launch_floor_s: Seconds = Field(default=0.0, alias="launch_floor")
    sources: dict[str, str] = Field(min_length=1)

    @model_validator(mode="after")
    def _of_this_world(self) -> Self:
        for dtype, peak in self.peak_flops_per_s.items():
            _within(f"peak_flops.{dtype}", peak, _RATE, format_flops_per_s)
        _within("hbm", self.hbm_bytes, _MEMORY_BYTES, format_bytes)
        _within("hbm_bandwidth", self.hbm_bytes_per_s, _RATE, format_bytes_per_s)
        _within("launch_floor", self.launch_floor_s, (0, _MAX_DELAY_S), show_seconds)
        return self


class LinkSpec(Spec):
    """A link between ranks: bandwidth per direction and per GPU, and latency of one message.

    Attributes:
        bytes_per_s: what one GPU can send on it while it receives as much.
        latency_s: from the start of a small message to its arrival.
        curve: fitted curves of collectives on it (simulator/hardware/links/<curve>.yaml), which
            give the share of the bandwidth that a message of some size reaches; None takes the
            bandwidth as what is usable, at every size.
    """

    name: str
    bytes_per_s: BytesPerS = Field(alias="bandwidth")
    latency_s: Seconds = Field(alias="latency")
    curve: str | None = Field(default=None, min_length=1)
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _of_this_world(self) -> Self:
        _within("bandwidth", self.bytes_per_s, _RATE, format_bytes_per_s)
        _within("latency", self.latency_s, (0, _MAX_DELAY_S), show_seconds)
        return self


class FabricSpec(Spec):
    """How nodes hang together: leaves (pods, rail groups) of nodes under a spine.

    Attributes:
        nodes_per_leaf: nodes that reach each other without the spine; None if all do.
        oversubscription: bandwidth into a leaf over what leaves it upwards; 1 is a full tree.
        spine_latency_s: what the way over the spine adds to a message.
    """

    nodes_per_leaf: PositiveInt | None = None
    oversubscription: float = Field(default=1.0, ge=1, le=1000)
    spine_latency_s: Seconds = Field(default=0.0, alias="spine_latency")
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _of_this_world(self) -> Self:
        _within("spine_latency", self.spine_latency_s, (0, _MAX_DELAY_S), show_seconds)
        return self


class NodeSpec(Spec):
    """One node: its processors, the link between them, its host memory and cores.

    Attributes:
        link: between the GPUs of an NVLink domain (of a node, where there is no such domain).
        nvlink_domain_gpus: GPUs that `link` joins: 72 of GB200 NVL72, in nodes of 4. None is
            the node itself.
        link_layout: "switch" gives a GPU its whole bandwidth towards any set of others; in a
            "mesh" it is cut into equal links, one to each other GPU of the node, so a group
            of g of the node's G GPUs has (g - 1) / (G - 1) of it. None is a switch.
        nics: network adapters of the node; None is one a GPU. ClusterSpec.network stays the
            bandwidth of one GPU: adapters that GPUs share are already divided in it.
        host_link: between a GPU and its host (PCIe, NVLink-C2C).
        host_memory_bytes_per_s: bandwidth of the node's host memory, shared by its GPUs.
        nvme: the node's own disks, bandwidth for one GPU where all use them.
    """

    gpus: int = Field(ge=1, le=MAX_GPUS)
    gpu: GpuSpec
    link: LinkSpec
    nvlink_domain_gpus: int | None = Field(default=None, ge=1, le=MAX_GPUS)
    link_layout: Literal["switch", "mesh"] | None = None
    nics: PositiveInt | None = None
    host_bytes: Bytes = Field(alias="host_memory")
    host_link: LinkSpec | None = None
    host_memory_bytes_per_s: BytesPerS | None = Field(default=None, alias="host_memory_bandwidth")
    nvme: LinkSpec | None = None
    cores: PositiveInt | None = None

    @property
    def domain_gpus(self) -> int:
        """GPUs that reach each other over `link`: those of the NVLink domain, else the node's."""
        return self.nvlink_domain_gpus or self.gpus

    @model_validator(mode="after")
    def _domain(self) -> Self:
        if self.domain_gpus % self.gpus:
            raise ValueError(
                f"nvlink_domain_gpus ({self.domain_gpus}) must be a multiple of gpus ({self.gpus})"
            )
        if self.host_memory_bytes_per_s is not None:
            rate = self.host_memory_bytes_per_s
            _within("host_memory_bandwidth", rate, _RATE, format_bytes_per_s)
        return self


class ClusterSpec(Spec):
    """A cluster of equal nodes.

    Attributes:
        network: the link between nodes (NVLink domains), per GPU.
        fabric: leaves and spine of the network; None is one full-bandwidth switch.
        storage: the shared file system, bandwidth for one GPU where all use it.
        price_usd_per_gpu_h: list price of one GPU hour, with its source; None if unknown.
        calibration: path or id of the calibration measured on it, if there is one.
    """

    name: str = Field(min_length=1)
    num_nodes: int = Field(ge=1, le=MAX_GPUS)
    node: NodeSpec
    network: LinkSpec | None = None
    fabric: FabricSpec | None = None
    storage: LinkSpec | None = None
    price_usd_per_gpu_h: UsdPerHour | None = Field(default=None, alias="price_per_gpu")
    price_source: str = ""
    power_usage_effectiveness: PositiveFloat = 1.0
    mtbf_gpu_h: NonNegativeFloat | None = None

    @property
    def num_gpus(self) -> int:
        """Ranks the cluster can hold: one a GPU."""
        return self.num_nodes * self.node.gpus

    @model_validator(mode="after")
    def _size(self) -> Self:
        if self.num_gpus > MAX_GPUS:
            raise ValueError(
                f"num_nodes * node.gpus ({self.num_gpus:,}) must not exceed {MAX_GPUS:,} GPUs"
            )
        return self

    @model_validator(mode="after")
    def _network(self) -> Self:
        if self.num_nodes > 1 and self.network is None and self.num_gpus > self.node.domain_gpus:
            raise ValueError("a cluster of more than one node needs its network link")
        return self

    def link_between(self, ranks_per_node_in_group: int, group_size: int) -> LinkSpec:
        """Returns the slowest link that a group of ranks crosses."""
        if group_size <= ranks_per_node_in_group or self.network is None:
            return self.node.link
        return self.network
