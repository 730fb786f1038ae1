"""Which part of which tensor a rank owns: priced by the simulator, built by the executor."""

from __future__ import annotations

from dataclasses import dataclass

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.placement import stage_of_chunk
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import EMBEDDING_LAYER, ParamTensor, layer_parameters

# Roles that tensor parallelism splits; norms, routers and MLA's latent down-projections
# stay whole on every rank of the group.
_TP_SPLIT_ROLES = frozenset({"embedding", "mlp", "shared_expert", "head", "attention"})
_TP_WHOLE_NAMES = ("q_a_proj", "kv_a_proj_with_mqa")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedTensor:
    """One rank's part of a tensor: its elements, and over how many ranks it is replicated."""

    param: ParamTensor
    numel: int
    replicas: int

    @property
    def expert(self) -> bool:
        """Whether its gradient is reduced over the expert-data-parallel group."""
        return self.param.role == "expert"


def tensor_split(param: ParamTensor, plan: ParallelPlan) -> int:
    """Returns over how many ranks of a stage one copy is cut (tp; ep * etp for experts)."""
    if param.role == "expert":
        return plan.ep * plan.etp
    if param.role in _TP_SPLIT_ROLES and not any(n in param.name for n in _TP_WHOLE_NAMES):
        return plan.tp
    return 1


def stage_tensors(spec: ModelSpec, plan: ParallelPlan, stage: int) -> tuple[ParamTensor, ...]:
    """Returns the tensors held by pipeline stage `stage`, in model order."""
    layers = list(plan.stage_layers(spec.num_layers)[stage])
    if stage == 0:
        layers.insert(0, EMBEDDING_LAYER)
    if stage == stage_of_chunk(plan, plan.num_chunks - 1):
        layers.extend(range(spec.num_layers, spec.num_layers + 1 + spec.mtp_layers))
    return tuple(p for layer in layers for p in layer_parameters(spec, layer))


def owned_tensors(spec: ModelSpec, plan: ParallelPlan, stage: int) -> tuple[OwnedTensor, ...]:
    """Returns what any one rank of `stage` holds before ZeRO: each tensor's local part."""
    out = []
    for param in stage_tensors(spec, plan, stage):
        split = tensor_split(param, plan)
        ranks = plan.dp * plan.cp * plan.tp  # of this stage
        out.append(
            OwnedTensor(param=param, numel=-(-param.numel // split), replicas=ranks // split)
        )
    return tuple(out)
