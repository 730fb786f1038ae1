"""ENV.sh: the environment variables of a run, each with its reason."""

from __future__ import annotations

from typing import NamedTuple

from flopwright.plan.file import PlanFile
from flopwright.planner.export.target import header, placement


class EnvVariable(NamedTuple):
    """One exported variable and why it is set."""

    name: str
    value: str
    reason: str


def environment(plan: PlanFile) -> tuple[EnvVariable, ...]:
    """Returns the variables a run of the plan wants, in the order they are written."""
    gpu = plan.scenario.cluster.node.gpu
    out = [
        EnvVariable(
            "OMP_NUM_THREADS",
            str(_threads(plan)),
            "threads of a rank on the host: its share of the node's cores, so that ranks do not "
            "take each other's",
        ),
        EnvVariable(
            "TOKENIZERS_PARALLELISM",
            "false",
            "tokenizer threads and forked data workers deadlock",
        ),
        EnvVariable(
            "TORCH_COMPILE_DISABLE",
            "1",
            "the prediction is of eager kernels, which run as they are",
        ),
        EnvVariable(
            "DS_ACCELERATOR",
            "cpu" if gpu.kind == "cpu" else "cuda",
            "DeepSpeed does not have to guess the device",
        ),
    ]
    if gpu.kind == "cpu":
        if placement(plan).nodes == 1:
            reason = "ranks of one machine meet on its loopback interface, whatever its name says"
            out.append(EnvVariable("GLOO_SOCKET_IFNAME", "lo", reason))
        return tuple(out)
    out += [
        EnvVariable(
            "PYTORCH_ALLOC_CONF",
            "expandable_segments:True",
            "the caching allocator grows segments instead of fragmenting: predicted peaks assume "
            "no fragmentation",
        ),
        EnvVariable(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "1",
            "a failed collective ends the rank instead of hanging the job",
        ),
        EnvVariable("NCCL_DEBUG", "WARN", "errors of the network are printed, its routine is not"),
    ]
    if plan.parallel.tp > 1 or plan.parallel.cp > 1:
        out.append(
            EnvVariable(
                "CUDA_DEVICE_MAX_CONNECTIONS",
                "1",
                "kernels start in the order they were issued, so that tensor-parallel "
                "communication is queued ahead of the compute that hides it",
            )
        )
    return tuple(out)


def _threads(plan: PlanFile) -> int:
    node = plan.scenario.cluster.node
    if node.gpu.kind == "cpu" or node.cores is None:
        return 1
    return max(1, node.cores // placement(plan).ranks_per_node)


def env_script(plan: PlanFile) -> str:
    """Returns ENV.sh; a variable that is already set keeps its value."""
    lines = [header(plan, "torchrun") + "# A variable that is already set is kept.\n"]
    for name, value, reason in environment(plan):
        lines.append(f'# {reason}\nexport {name}="${{{name}:-{value}}}"')
    return "\n".join(lines) + "\n"
