"""What every export target shares: names that are safe in a shell, and where ranks stand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import flopwright
from flopwright.plan.file import PlanFile

# Versions whose formats the targets were written against; each stands in its file's header.
TARGET_VERSIONS: Final = {
    "deepspeed": "DeepSpeed 0.19.8",
    "torchrun": "torch 2.13",
    "slurm": "Slurm 22.05",
    "chrome_trace": "Kineto trace schema 1",
    "accelerate": "accelerate 1.15",
    "dstack": "dstack 0.22.5",
    "kubeflow": "Kubeflow Trainer 2.3 (trainer.kubeflow.org/v1alpha1)",
    "megatron": "Megatron-LM (Megatron Core 0.16)",
    "skypilot": "SkyPilot 0.14.1",
    "torchtitan": "torchtitan 0.2.2",
    "verl": "verl 0.9.1",
}
RENDEZVOUS_PORT: Final = 29500
# As pip builds it from a checkout; README.md of a bundle says how it gets beside the scripts.
WHEEL: Final = f"flopwright-{flopwright.__version__}-py3-none-any.whl"
PLAN_FILE: Final = "plan.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Ranks on nodes: `nodes` nodes with `ranks_per_node` ranks each."""

    nodes: int
    ranks_per_node: int


def placement(plan: PlanFile) -> Placement:
    """Returns the fewest nodes that hold the plan's ranks with the same number on each.

    torchrun starts equally many processes on each node, so the ranks a node are a divisor
    of the world size.
    """
    world, gpus = plan.parallel.world_size, plan.scenario.cluster.node.gpus
    per_node = next(n for n in range(min(world, gpus), 0, -1) if world % n == 0)
    return Placement(nodes=world // per_node, ranks_per_node=per_node)


def slug(name: str) -> str:
    """Returns `name` with every character that a shell or file system reads replaced by '-'."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "plan"


def header(plan: PlanFile, target: str) -> str:
    """Returns the comment lines that open an exported script: what it is and what wrote it."""
    return (
        f"# {slug(plan.name)}: written by flopwright {flopwright.__version__} "
        f"for {TARGET_VERSIONS[target]}\n"
        f"# plan: {plan.parallel.label()} on {plan.parallel.world_size} ranks; "
        f"model hash {plan.model_hash}\n"
    )
