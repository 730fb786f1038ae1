"""Every name inside DeepSpeed that this project touches, in one place.

DeepSpeed is pinned exactly (pyproject.toml); tests/unit/executor/parallel checks these
against the installed version, so that an upgrade which moves one fails there and not in a
training run. DeepSpeed's engine keeps its process groups in module globals, one set a
process; here several plans train in one process, so its ZeRO optimizer is driven directly,
with our groups, as its own pipeline engine drives it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import nn

PINNED_VERSION: Final = "0.19.8"

# Arguments of DeepSpeedZeroOptimizer.__init__ that are passed.
ZERO_ARGUMENTS: Final = (
    "init_optimizer",
    "param_names",
    "timers",
    "optimizer_params",
    "contiguous_gradients",
    "reduce_bucket_size",
    "dp_process_group",
    "expert_parallel_group",
    "expert_data_parallel_group",
    "reduce_scatter",
    "overlap_comm",
    "offload_optimizer_config",
    "clip_grad",
    "gradient_accumulation_dtype",
    "communication_data_type",
    "gradient_accumulation_steps",
    "partition_grads",
    "has_moe_layers",
    "check_grad_overflow",
    "compute_grad_norm",
)
# Methods that are called.
ZERO_METHODS: Final = (
    "reduce_gradients",
    "step",
    "zero_grad",
    "set_gradient_accumulation_boundary",
    "process_gradients",
    "overlapping_partition_gradients_reduce_epilogue",
    "finalize_gradient_accumulation_boundary",
    "get_param_id",
    "update_lp_params",
    "_wait_for_offload_copies",
)
# Attributes that are read or written; they stand as `self.<name>` in its source.
ZERO_ATTRIBUTES: Final = (
    "averaged_gradients",
    "bit16_groups",
    "compute_grad_norm",
    "dtype",
    "grad_position",
    "params_in_partition",
    "parallel_partitioned_bit16_groups",
    "partition_size",
    "real_dp_process_group",
    "single_partition_of_fp32_groups",
    "use_grad_accum_attribute",
    "_grad_acc_hooks",
)
# The same of DeepSpeedZeroOptimizer_Stage3.
STAGE3_ARGUMENTS: Final = (
    "module",
    "init_optimizer",
    "param_names",
    "timers",
    "ds_config",
    "contiguous_gradients",
    "reduce_bucket_size",
    "param_persistence_threshold",
    "dp_process_group",
    "reduce_scatter",
    "overlap_comm",
    "offload_optimizer_config",
    "offload_param_config",
    "offload_ratio",
    "clip_grad",
    "gradient_accumulation_dtype",
    "communication_data_type",
    "gradient_accumulation_steps",
)
STAGE3_METHODS: Final = (
    "step",
    "zero_grad",
    "set_gradient_accumulation_boundary",
    "reduce_ready_partitions_and_remove_grads",
    "overlapping_partition_gradients_reduce_epilogue",
    "clear_backward_seen_flag",
    "finalize_gradient_accumulation_boundary",
    "get_param_id",
    "_reassign_or_swap_out_partitioned_parameters",
)
STAGE3_ATTRIBUTES: Final = (
    "averaged_gradients",
    "fp16_groups",
    "fp16_partitioned_groups_flat",
    "fp32_partitioned_groups_flat",
    "grad_position",
    "parameter_offload",
    "_grad_acc_hooks",
    "_leaf_module_hooks",
)
# Of what manages its weights.
STAGE3_WEIGHTS_METHOD: Final = "release_backward_leftovers"
# Marks on tensors and parameters: padding pieces, experts, the map to master copies, and
# where sums of gradients wider than the weights are kept.
ZERO_PADDING_MARK: Final = "_zero_padding"
EXPERT_MARKS: Final = ("allreduce", "group_name")
MASTER_MAP_MARK: Final = "_hp_mapping"
SUM_MARK: Final = "grad_accum"
# What the stage's step calls around its gathering of weights.
GATHER_TIMER: Final = "OPTIMIZER_ALLGATHER_TIMER"


def disable_jit_builds() -> None:
    """Keeps `init_distributed` from compiling its shared-memory collectives (minutes, a lock)."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def start_communication() -> None:
    """Lets DeepSpeed adopt torch's process group, which must exist already."""
    import deepspeed.comm

    disable_jit_builds()
    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed(dist_init_required=False, verbose=False)


def load_muon_uncompiled() -> None:
    """Loads the Muon module, which the ZeRO optimizer imports in its first reduction, quickly.

    Loading it decorates functions for torch.compile, whose import takes seconds; they are
    not used here (Muon would be ours), so they are left as they are.
    """
    from deepspeed.runtime import compiler

    decorate = compiler.compile
    compiler.compile = lambda *_args, **_options: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = decorate


def zero_optimizer_class() -> Any:
    """Returns DeepSpeed's ZeRO stage 1 and 2 optimizer."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return DeepSpeedZeroOptimizer


def host_offload(*, pin_memory: bool) -> Any:
    """Returns the settings under which the optimizer's part lives in host memory.

    The optimizer is ours there too: DeepSpeed's own (CPUAdam) would be compiled at run time.
    """
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    return DeepSpeedZeroOffloadOptimizerConfig(device="cpu", pin_memory=pin_memory)


def host_weights(*, pin_memory: bool) -> Any:
    """Returns the settings under which stage 3's parts of weights live in host memory."""
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig

    return DeepSpeedZeroOffloadParamConfig(device="cpu", pin_memory=pin_memory)


def stage3_optimizer_class() -> Any:
    """Returns DeepSpeed's ZeRO stage 3 optimizer."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return DeepSpeedZeroOptimizer_Stage3


def cut_weights(module: nn.Module, group: Any, dtype: torch.dtype, away: Any | None) -> None:
    """Cuts a module's weights over a group's ranks; `away` as `host_weights` returns it."""
    from deepspeed.runtime.zero.partition_parameters import Init

    Init(
        module=module,
        data_parallel_group=group,
        dtype=dtype,
        # It computes a batch size from these and looks at nothing else.
        config_dict_or_path={"train_micro_batch_size_per_gpu": 1},
        remote_device=None if away is None else away.device,
        pin_memory=away is not None and away.pin_memory,
    )


def gather_together(layer: nn.Module) -> None:
    """Lets a layer's weights be gathered as one: its modules hand weights to each other's ops."""
    from deepspeed.utils import set_z3_leaf_module

    set_z3_leaf_module(layer, True)


def used_by(module: nn.Module, weight: nn.Parameter) -> None:
    """Says that a module's forward reads a weight that is not its own."""
    from deepspeed.runtime.zero import register_external_parameter

    register_external_parameter(module, weight)


def gathered(weight: nn.Parameter) -> AbstractContextManager[Any]:
    """Makes a cut weight whole inside; collective."""
    from deepspeed.runtime.zero import GatheredParameters

    context: AbstractContextManager[Any] = GatheredParameters([weight], modifier_rank=None)
    return context


def gather_timer_name() -> str:
    """Returns the name under which the optimizer times its gathering of weights."""
    from deepspeed.runtime.zero import stage_1_and_2

    return str(getattr(stage_1_and_2, GATHER_TIMER))


def quiet_logging() -> None:
    """Keeps DeepSpeed's messages to errors."""
    import logging

    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
