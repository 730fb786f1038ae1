"""A calibration: efficiency curves and factors with where they hold and how well.

Seconds of an operator = floor_s + max(flops / (peak * efficiency(m, k, n)),
moved bytes / bytes_per_s), times the factor of its time class. Efficiency saturates:
`max_efficiency * m/(m+half_m) * k/(k+half_k) * n/(n+half_n)`, with two refinements that
public tables asked for (simulator/operators/forms.py). A collective takes
alpha_s + bytes / bytes_per_s.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from flopwright.spec.base import Spec


class EfficiencyCurve(Spec):
    """One kernel class at one dtype on one processor.

    Attributes:
        peak_flops_per_s: what efficiency 1 means; None takes the GPU's datasheet peak.
        max_efficiency: share of the peak reached at large shapes.
        half_m, half_k, half_n: sizes at which a dimension alone halves the efficiency.
        half_rows: rows of all heads together (batch * m) that do, for attention.
        decline_flops, decline_power: work of one call beyond which the efficiency falls as
            (1 + flops / decline_flops) ** -decline_power; power 0 is no decline.
        sustained: clocks of long runs over those of the points, as a share of the efficiency.
        head_dim: query width that an attention curve was measured at; 0 is any.
        causal: whether the mask left half of the pairs out.
        family: memory-bound operators it is about ("permute"); "" is all without their own.
        bytes_per_s: effective memory bandwidth; None takes memory_efficiency * datasheet.
        floor_s: time of a call that does nothing.
        residual_log: standard deviation of log(measured / fitted) over the fit's points.
        held_out: errors on shapes kept out of the fit, as shares: "median" and "p90" of
            |fitted / measured - 1|; empty where there are no such points.
        domain: smallest and largest m, k, n of the points; empty where it is not known.
        source: where the numbers come from, for a curve that no probe of ours measured.
    """

    kind: Literal[
        "gemm", "grouped_gemm", "attention", "kda", "memory_bound", "optimizer", "quantize"
    ]
    dtype: str
    phase: Literal["forward", "backward"] = "forward"
    head_dim: int = Field(default=0, ge=0)
    causal: bool = True
    family: str = ""
    peak_flops_per_s: PositiveFloat | None = None
    max_efficiency: float = Field(default=0.7, gt=0, le=1)
    half_m: NonNegativeFloat = 0.0
    half_k: NonNegativeFloat = 0.0
    half_n: NonNegativeFloat = 0.0
    half_rows: NonNegativeFloat = 0.0
    decline_flops: PositiveFloat = 1e12
    decline_power: NonNegativeFloat = 0.0
    sustained: float = Field(default=1.0, gt=0, le=1)
    bytes_per_s: PositiveFloat | None = None
    memory_efficiency: float = Field(default=0.8, gt=0, le=1)
    floor_s: NonNegativeFloat = 0.0
    residual_log: NonNegativeFloat = 0.0
    points: int = 0
    held_out: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    domain: dict[Literal["m", "k", "n"], tuple[float, float]] = Field(default_factory=dict)
    source: str = ""


class CollectiveCurve(Spec):
    """One collective between `ranks` ranks on one link: alpha + bytes / bytes_per_s.

    Attributes:
        domain_bytes: smallest and largest payload of the points; None where not known.
    """

    collective: str
    link: str
    ranks: int
    alpha_s: NonNegativeFloat
    bytes_per_s: PositiveFloat
    residual_log: NonNegativeFloat = 0.0
    points: int = 0
    domain_bytes: tuple[float, float] | None = None


class Calibration(Spec):
    """Curves and factors for one hardware and software stack.

    Attributes:
        stack_id: Fingerprint.stack_id() it was measured on; "" for the public prior.
        hardware_id: the same without the software (report/drift.py); "" where not known.
        factors: multiplier by time class (report/metrics.py), learnt from whole runs.
        factor_log_std: standard deviation of each factor's logarithm.
        memory_factors: multiplier by memory class, learnt from whole runs.
        hidden_share: share of a communication class (report/metrics.py) that is hidden
            behind compute where there is compute to hide it; a class not named hides nothing.
        sources: where other numbers of the record come from, by field name.
        step_residual_log: standard deviation of log(measured / predicted) step time over
            the runs it was fitted to (or, for a prior, over published runs).
        step_residual_dof: degrees of freedom behind step_residual_log; None for a prior,
            whose spread is taken as known.
        base: id of the calibration this one was learnt from; "" if there was none.
        measurements: ids of the measurements it learnt from.
        contended_ranks: ranks that ran side by side while the points were taken.
        call_s: seconds that every operator of a step takes beyond its curve, by "forward" and
            "backward": what the program between operators does; and that every collective
            inside a layer takes beyond its own ("sync"): waiting for the last rank, packing.
            Nothing on a GPU, where the program runs ahead (layer_host_s).
        call_log_std: standard deviation of the logarithm of each.
        waiting_log: logarithm of what waiting for each other lengthens steps by; the factors
            hold it already.
        probe_factors, probe_factor_log_std, probe_calls, probe_waiting_log: the same before
            whole runs were learnt from: those of a probe's reference steps. Learning anew
            starts there.

    What a software stack adds (all neutral where not given; `with_stack` in files.py lays a
    stack over a GPU's prior):
        kernel_factors: multiplier of the seconds of a kernel class (simulator/training/
            kernels.py): "gemm", "grouped_gemm", "attention", "attention_backward",
            "memory_bound", "optimizer", "quantize", "head"; and beside them "unaligned" (a
            product whose weight has a side that is no multiple of 64) and "odd" (none of 8).
        layer_host_s: host seconds of one layer's forward and backward in one micro-batch, by
            "dense" or "moe"; a stage takes the longer of the GPU's and the host's time.
        step_constant_s: seconds a step that no other term holds.
        overlap_slowdown: by communication class, seconds that compute loses for every second
            of communication that it hides (the SMs and the bandwidth they share).
        attention_kernel: "flash", or "unfused": scores are written, read and kept.
        pad_vocab_to: a rank's part of the vocabulary is padded to a multiple of this.
        data_parallel_latency_s: seconds a rank of the group adds to a gradient reduction.
        graphs: whether layers replay CUDA graphs (then layer_host_s is small).
    """

    id: str
    created: str
    source: str
    stack_id: str = ""
    hardware_id: str = ""
    curves: tuple[EfficiencyCurve, ...] = ()
    collectives: tuple[CollectiveCurve, ...] = ()
    host_floor_s: NonNegativeFloat = 0.0
    factors: dict[str, PositiveFloat] = Field(default_factory=dict)
    factor_log_std: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    memory_factors: dict[str, PositiveFloat] = Field(default_factory=dict)
    hidden_share: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)
    step_residual_log: NonNegativeFloat = 0.3
    step_residual_dof: PositiveFloat | None = None
    base: str = ""
    measurements: tuple[str, ...] = ()
    contended_ranks: int = 1
    call_s: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    call_log_std: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    waiting_log: float = 0.0
    probe_factors: dict[str, PositiveFloat] = Field(default_factory=dict)
    probe_factor_log_std: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    probe_calls: dict[str, dict[str, NonNegativeFloat]] = Field(default_factory=dict)
    probe_waiting_log: float = 0.0
    kernel_factors: dict[str, PositiveFloat] = Field(default_factory=dict)
    layer_host_s: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    step_constant_s: NonNegativeFloat = 0.0
    overlap_slowdown: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    attention_kernel: Literal["flash", "unfused"] = "flash"
    pad_vocab_to: int = Field(default=1, ge=1, le=2**20)
    data_parallel_latency_s: NonNegativeFloat = 0.0
    graphs: bool = False
