"""Which shapes a probe measures: those a model needs, then a grid that spans the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from flopwright.executor.measure.probe_cases import (
    TORCH_DTYPES,
    ProbeCase,
    add_case,
    attention_case,
    cross_entropy_case,
    embedding_case,
    grouped_case,
    linear_case,
    norm_case,
    permute_case,
    rope_case,
    route_case,
    swiglu_case,
    unpermute_case,
)
from flopwright.executor.measure.probe_delta import KERNEL, kda_case
from flopwright.executor.measure.probe_design import by_information
from flopwright.executor.measure.probe_plain import copy_case, host_copy_case, quantize_case
from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import OpKind, OpTable, Phase, ShardShape
from flopwright.plan.file import PlanFile
from flopwright.spec.model import MlaAttention, ModelSpec
from flopwright.spec.workload import Workload

# Rows of a product and widths between which real layers lie: small ones show the floor and
# the rise of the rate, large ones its top.
_GRID: Final = (
    (64, 64, 64),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (128, 1024, 1024),
    (1024, 128, 1024),
    (1024, 1024, 128),
    (2048, 256, 256),
    (256, 2048, 256),
    (256, 256, 2048),
)
# What the cluster file calls the peak, measured whatever the time.
_TOP: Final = (512, 512, 512)
_GPU_TOP: Final = (4096, 4096, 4096)
_GPU_GRID: Final = (
    *_GRID,
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (512, 8192, 8192),
    (8192, 512, 8192),
    (8192, 8192, 512),
)
_COPY_BYTES: Final = (2**20, 2**26)
_QUANTIZED: Final = ((256, 512), (2048, 1024))
_NARROWED: Final = frozenset({"bf16", "fp32"})


def grid_cases(dtypes: Iterable[str], device_kind: str) -> list[ProbeCase]:
    """Returns products over the grid in each dtype, plain copies, and narrowing to FP8."""
    grid = _GPU_GRID if device_kind == "cuda" else _GRID
    cases = [copy_case(n) for n in _COPY_BYTES]
    cases += [quantize_case(*shape, d) for shape in _QUANTIZED for d in dtypes if d in _NARROWED]
    if device_kind == "cuda":
        cases += [host_copy_case(n, back=back) for n in _COPY_BYTES for back in (False, True)]
    for m, k, n in grid:
        needed = (m, k, n) == (_GPU_TOP if device_kind == "cuda" else _TOP)
        cases += [linear_case(m, k, n, d, essential=needed) for d in dtypes if d in TORCH_DTYPES]
    return cases


def cases_for(plans: Sequence[PlanFile], device_kind: str) -> list[ProbeCase]:
    """Returns the cases of a probe: what the plans' models run, then the grid.

    The grid is measured in the plans' compute dtypes, and in fp32 and bf16; what the plans'
    shapes leave least sure comes first (probe_design.py), as the time may not be enough.
    """
    found: dict[tuple[object, ...], ProbeCase] = {}
    dtypes = {"fp32": None, "bf16": None}
    for plan in plans:
        workload, split = plan.scenario.workload, plan.parallel
        dtypes[workload.precision.compute] = None
        for case in shapes_for(
            plan.scenario.model, workload, (split.micro_batch_size,), (split.tp,), (split.ep,)
        ):
            found.setdefault(_key(case), case)
    grid = by_information(found.values(), grid_cases(dtypes, device_kind))
    for case in grid:
        found.setdefault(_key(case), case)
    return list(found.values())


def shapes_for(
    spec: ModelSpec,
    workload: Workload,
    micro_batch_sizes: Sequence[int] = (1,),
    tp: Sequence[int] = (1,),
    ep: Sequence[int] = (1,),
) -> list[ProbeCase]:
    """Returns the distinct ops that the model runs at the given splits.

    Products and attention are read off the rows of `layer_cost`, so that a change of the
    model changes the probe; the others follow the model's widths.
    """
    dtype = workload.precision.compute
    found: dict[tuple[object, ...], ProbeCase] = {}
    for micro_batch in micro_batch_sizes:
        for tensor in tp:
            for expert in ep:
                shape = ShardShape(
                    micro_batch_size=micro_batch,
                    seq_len=workload.seq_len,
                    tp=tensor,
                    ep=expert,
                    dtype=dtype,
                )
                for layer in _distinct_layers(spec):
                    _add_rows(found, layer_cost(spec, layer, shape).ops, spec, micro_batch)
        tokens = micro_batch * workload.seq_len
        for case in _memory_bound_cases(spec, micro_batch, tokens, workload.seq_len, dtype):
            found.setdefault(_key(case), case)
    return list(found.values())


def _key(case: ProbeCase) -> tuple[object, ...]:
    rows = case.rows
    return (
        case.name, case.dtype, float(rows.m[0, 0]), float(rows.k[0, 0]), float(rows.n[0, 0]),
        float(rows.batch[0, 0]), float(rows.read_bytes[0, 0]),
    )  # fmt: skip


def _distinct_layers(spec: ModelSpec) -> list[int]:
    """Returns the embedding, one layer of each kind, and the head."""
    kinds = {
        (spec.is_moe_layer(i), spec.sliding_window(i), spec.attention_of(i).kind): i
        for i in reversed(range(spec.num_layers))
    }
    return [-1, *sorted(kinds.values()), spec.num_layers]


def _add_rows(
    found: dict[tuple[object, ...], ProbeCase], ops: OpTable, spec: ModelSpec, sequences: int
) -> None:
    for i in range(len(ops)):
        if ops.phase[i] != Phase.FORWARD or ops.count[i, 0] == 0:
            continue
        if ops.dtype[i] not in TORCH_DTYPES:
            continue
        m, k, n, batch = (round(float(c[i, 0])) for c in (ops.m, ops.k, ops.n, ops.batch))
        if ops.kind[i] == OpKind.GEMM:
            case = linear_case(m, k, n, ops.dtype[i])
        elif ops.kind[i] == OpKind.GROUPED_GEMM:
            case = grouped_case(max(1, m), batch, k, n, ops.dtype[i])
        elif ops.kernel[i] == KERNEL:
            case = kda_case(sequences, m, batch // sequences, k, ops.dtype[i])
            shorter = kda_case(
                sequences, max(1, m // 4), batch // sequences, k, ops.dtype[i], essential=False
            )
            found.setdefault(_key(shorter), shorter)
        elif ops.kind[i] == OpKind.ATTENTION:
            case = _attention(spec, sequences, m, batch // sequences, ops.dtype[i])
        else:
            continue
        found.setdefault(_key(case), case)


def _attention(spec: ModelSpec, sequences: int, seq_len: int, heads: int, dtype: str) -> ProbeCase:
    of = spec.attention
    share = of.num_heads // heads
    kv_heads = heads if isinstance(of, MlaAttention) else max(1, of.num_kv_heads // share)
    return attention_case(
        sequences, seq_len, heads, kv_heads, of.qk_head_dim, of.v_head_dim, dtype
    )


def _memory_bound_cases(
    spec: ModelSpec, sequences: int, tokens: int, seq_len: int, dtype: str
) -> list[ProbeCase]:
    of, moe = spec.attention, spec.moe
    norms = {spec.hidden_size}
    cases = [
        swiglu_case(tokens, spec.mlp.intermediate_size, dtype),
        cross_entropy_case(tokens, spec.vocab_size, dtype),
        embedding_case(tokens, spec.vocab_size, spec.hidden_size, dtype),
        add_case(tokens * spec.hidden_size, dtype),
    ]
    if isinstance(of, MlaAttention):
        norms |= {of.kv_lora_rank} | ({of.q_lora_rank} if of.q_lora_rank else set())
        cases.append(
            rope_case(
                sequences, seq_len, of.num_heads, of.qk_nope_head_dim, of.qk_rope_head_dim, dtype
            )
        )
    elif of.rope is not None:
        cases.append(rope_case(sequences, seq_len, of.num_heads, 0, of.head_dim, dtype))
    cases += [norm_case(tokens, width, dtype) for width in sorted(norms)]
    if moe is not None:
        routed, width = (tokens, moe.top_k, moe.num_experts), spec.hidden_size
        cases += [
            route_case(tokens, moe, dtype),
            swiglu_case(tokens * moe.top_k, moe.expert_intermediate_size, dtype),
            permute_case(*routed, width, dtype),
            unpermute_case(*routed, width, dtype),
        ]
    return cases
