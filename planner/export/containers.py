"""Launch files for clusters of containers: Kubeflow TrainJob, SkyPilot task, dstack task.

Fields: Kubeflow Trainer 2.3 (trainer.kubeflow.org/v1alpha1), SkyPilot 0.14, dstack 0.22.
All three start the bundle's own training program; the bundle's folder has to be reachable on
every node at BUNDLE_FOLDER (an image layer, a volume, or the workdir that the launcher copies).
"""

from __future__ import annotations

import re
import shlex
from typing import Any, Final

import yaml

from flopwright.errors import InputError, Violation
from flopwright.plan.file import PlanFile
from flopwright.planner.export.env import environment
from flopwright.planner.export.target import RENDEZVOUS_PORT, WHEEL, header, placement, slug
from flopwright.planner.export.text import TargetFile, omission_lines
from flopwright.planner.export.torchrun import WORKER_MODULE, program_arguments

KUBEFLOW_FILE: Final = "trainjob.yaml"
SKYPILOT_FILE: Final = "skypilot.yaml"
DSTACK_FILE: Final = "dstack.yaml"
BUNDLE_FOLDER: Final = "/bundle"
RUNTIME: Final = "torch-distributed"

# Catalog GPU -> the accelerator's name at SkyPilot and dstack.
_ACCELERATORS: Final = {
    "a100_sxm_40gb": ("A100", "A100:40GB"),
    "a100_sxm_80gb": ("A100-80GB", "A100:80GB"),
    "h100_sxm": ("H100", "H100"),
    "h200_sxm": ("H200", "H200"),
    "b200": ("B200", "B200"),
    "b300": ("B300", "B300"),
    "gb200": ("GB200", "GB200"),
    "gb300": ("GB300", "GB300"),
    "gh200": ("GH200", "GH200"),
    "mi300x": ("MI300X", "MI300X"),
    "mi325x": ("MI325X", "MI325X"),
    "mi355x": ("MI355X", "MI355X"),
    "l40s": ("L40S", "L40S"),
    "rtx_4090": ("RTX4090", "RTX4090"),
    "a6000": ("A6000", "A6000"),
}
_DNS_LENGTH: Final = 63
_SAVING: Final = (
    "how often to save: --checkpoint-every STEPS --resume behind the program's arguments saves on "
    "the way and goes on after a restart, where all nodes share the folder of --out"
)


def _dns_name(name: str) -> str:
    """Returns the name as an RFC 1123 label: lower case, digits and hyphens."""
    plain = re.sub(r"[^a-z0-9]+", "-", slug(name).lower()).strip("-")
    return plain[:_DNS_LENGTH].strip("-") or "plan"


def _accelerator(plan: PlanFile, which: int) -> str | None:
    """Returns the cloud's name of the plan's GPU; None on CPU nodes.

    Raises:
        InputError: a GPU that the clouds have no name for.
    """
    gpu = plan.scenario.cluster.node.gpu
    if gpu.kind == "cpu":
        return None
    names = _ACCELERATORS.get(gpu.name)
    if names is None:
        raise InputError(
            Violation(
                field="cluster.node.gpu.name",
                value=gpu.name,
                rule="no cloud accelerator is known by this name",
                nearest_fix=f"known: {', '.join(sorted(_ACCELERATORS))}",
            )
        )
    return names[which]


def _need_image(image: str | None, target: str) -> str:
    if image:
        return image
    raise InputError(
        Violation(
            field="image",
            rule=f"{target} starts a container, so its image must be named",
            nearest_fix="give --image, with flopwright[train] installed in it",
        )
    )


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, as people write shell commands."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _block)


def _dump(data: dict[str, Any]) -> str:
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=1000))


def kubeflow_file(plan: PlanFile, image: str | None) -> TargetFile:
    """Returns the TrainJob of the plan; torch's rendezvous comes from the runtime (PET_*).

    Raises:
        InputError: no image.
    """
    where, node = placement(plan), plan.scenario.cluster.node
    per_node: dict[str, Any] = {}
    if node.gpu.kind != "cpu":
        vendor = "amd.com/gpu" if node.gpu.kind == "rocm" else "nvidia.com/gpu"
        per_node[vendor] = str(where.ranks_per_node)
    if node.cores is not None:
        per_node["cpu"] = str(node.cores)
    trainer: dict[str, Any] = {
        "image": _need_image(image, "Kubeflow"),
        "command": ["torchrun", "-m", WORKER_MODULE],
        "args": list(_in_bundle(program_arguments())),
        "env": [{"name": v.name, "value": v.value} for v in _cluster_environment(plan)],
        "numNodes": where.nodes,
        "numProcPerNode": where.ranks_per_node,
    }
    if per_node:
        trainer["resourcesPerNode"] = {"limits": per_node, "requests": dict(per_node)}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": _dns_name(plan.name)},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": RUNTIME,
            },
            "trainer": trainer,
        },
    }
    omitted = (
        f"the volume that holds the bundle at {BUNDLE_FOLDER}: the runtime's or the image's",
        _SAVING,
    )
    head = header(plan, "kubeflow") + f"# kubectl create -f {KUBEFLOW_FILE}\n"
    return TargetFile(
        name=KUBEFLOW_FILE, text=head + omission_lines(omitted) + _dump(job), omitted=omitted
    )


def _in_bundle(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the program's arguments with its files named in the mounted bundle."""
    return tuple(a if a.startswith("--") else f"{BUNDLE_FOLDER}/{a}" for a in arguments)


def _cluster_environment(plan: PlanFile) -> tuple[Any, ...]:
    """Returns the run's variables but those that only hold on the machine that exports."""
    return tuple(v for v in environment(plan) if v.name != "GLOO_SOCKET_IFNAME")


def skypilot_file(plan: PlanFile, image: str | None = None) -> TargetFile:
    """Returns the SkyPilot task: the bundle's folder is its workdir.

    Raises:
        InputError: a GPU without a cloud name.
    """
    where = placement(plan)
    resources: dict[str, Any] = {}
    accelerator = _accelerator(plan, 0)
    if accelerator is not None:
        resources["accelerators"] = f"{accelerator}:{where.ranks_per_node}"
    elif plan.scenario.cluster.node.cores is not None:
        resources["cpus"] = f"{plan.scenario.cluster.node.cores}+"
    if where.nodes > 1:
        resources["network_tier"] = "best"
    if image:
        resources["image_id"] = image if ":" in image.split("/")[0] else f"docker:{image}"
    task: dict[str, Any] = {
        "name": _dns_name(plan.name),
        "num_nodes": where.nodes,
        "resources": resources,
        "workdir": ".",
        "envs": {v.name: v.value for v in _cluster_environment(plan)},
        "setup": _setup(),
        "run": _meeting_command(
            plan,
            'head="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"',
            "$head",
            "$SKYPILOT_NODE_RANK",
        ),
    }
    head = header(plan, "skypilot") + f"# In this folder: sky launch {SKYPILOT_FILE}\n"
    omitted = (_SAVING,)
    return TargetFile(
        name=SKYPILOT_FILE, text=head + omission_lines(omitted) + _dump(task), omitted=omitted
    )


def dstack_file(plan: PlanFile, image: str | None) -> TargetFile:
    """Returns the dstack task.

    Raises:
        InputError: no image, or a GPU without a cloud name.
    """
    where = placement(plan)
    accelerator = _accelerator(plan, 1)
    task: dict[str, Any] = {
        "type": "task",
        "name": _dns_name(plan.name),
        "nodes": where.nodes,
        "image": _need_image(image, "dstack"),
        "files": ["."],
        "env": [f"{v.name}={v.value}" for v in _cluster_environment(plan)],
        "commands": [
            _meeting_command(plan, None, "$DSTACK_MASTER_NODE_IP", "$DSTACK_NODE_RANK").strip()
        ],
    }
    if accelerator is not None:
        task["resources"] = {"gpu": f"{accelerator}:{where.ranks_per_node}"}
    omitted = ("price and spot limits: the fleet's or `dstack apply` options", _SAVING)
    head = header(plan, "dstack") + f"# In this folder: dstack apply -f {DSTACK_FILE}\n"
    return TargetFile(
        name=DSTACK_FILE, text=head + omission_lines(omitted) + _dump(task), omitted=omitted
    )


def _setup() -> str:
    """Returns the shell lines that install the wheel beside the task (README.md says whence)."""
    missing = f"put {WHEEL} beside {SKYPILOT_FILE}: README.md says how"
    return (
        f'if [ ! -f {WHEEL} ]; then echo "{missing}" >&2; exit 1; fi\n'
        f"pip install './{WHEEL}[train]'\n"
    )


def _meeting_command(plan: PlanFile, prepare: str | None, address: str, rank: str) -> str:
    """Returns the shell lines that start torchrun on one of several nodes."""
    where = placement(plan)
    program = f"-m {WORKER_MODULE} {shlex.join(program_arguments())}"
    if where.nodes == 1:
        return f"torchrun --standalone --nproc-per-node={where.ranks_per_node} {program}\n"
    lines = [prepare] if prepare else []
    lines.append(
        f"torchrun --nnodes={where.nodes} --nproc-per-node={where.ranks_per_node} "
        f'--node-rank="{rank}" --rdzv-backend=c10d '
        f'--rdzv-endpoint="{address}:{RENDEZVOUS_PORT}" --rdzv-id=flopwright {program}'
    )
    return "\n".join(lines) + "\n"
