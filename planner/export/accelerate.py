"""The configuration file of `accelerate launch`, with the bundle's DeepSpeed JSON.

Fields: accelerate 1.15, `accelerate/commands/config/config_args.py` (ClusterConfig).
"""

from __future__ import annotations

from typing import Final

import yaml

from flopwright.errors import InputError, Violation
from flopwright.plan.file import PlanFile
from flopwright.planner.export import deepspeed_json
from flopwright.planner.export.target import RENDEZVOUS_PORT, header, placement
from flopwright.planner.export.text import TargetFile, omission_lines, that_apply

FILE: Final = "accelerate.yaml"


def accelerate_file(plan: PlanFile) -> TargetFile:
    """Returns the YAML; machine_rank and the first node's address are given at launch.

    Raises:
        InputError: a plan that accelerate's DeepSpeed plugin cannot run (pipeline stages).
    """
    if plan.parallel.pp > 1:
        raise InputError(
            Violation(
                field="parallel.pp",
                value=str(plan.parallel.pp),
                rule="accelerate has no pipeline stages",
                nearest_fix="use pp 1, or another target",
            )
        )
    where, cpu = placement(plan), plan.scenario.cluster.node.gpu.kind == "cpu"
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_CPU" if cpu else "DEEPSPEED",
        "num_machines": where.nodes,
        "num_processes": where.nodes * where.ranks_per_node,
        "machine_rank": 0,
        "main_process_port": RENDEZVOUS_PORT,
        "main_training_function": "main",
        "rdzv_backend": "static" if where.nodes == 1 else "c10d",
        "same_network": True,
        "use_cpu": cpu,
        "debug": False,
    }
    if not cpu:
        # The JSON states precision, batch and ZeRO: accelerate refuses a second statement.
        config["deepspeed_config"] = {
            "deepspeed_config_file": "deepspeed.json",
            "zero3_init_flag": plan.parallel.zero_stage == 3,
        }
    omitted = _not_expressed(plan)
    run = "# accelerate launch --config_file accelerate.yaml"
    if where.nodes > 1:
        run += " --machine_rank N --main_process_ip FIRST_NODE"
    head = header(plan, "accelerate") + f"{run} TRAIN.py\n" + omission_lines(omitted)
    text = head + yaml.safe_dump(config, sort_keys=False)
    return TargetFile(name=FILE, text=text, omitted=omitted)


def _not_expressed(plan: PlanFile) -> tuple[str, ...]:
    """What neither this file nor the bundle's DeepSpeed JSON says: the program does it."""
    parallel = plan.parallel
    names = ("tp", "cp", "ep")
    axes = [f"{n} {getattr(parallel, n)}" for n in names if getattr(parallel, n) > 1]
    groups = f"{', '.join(axes)}: the training program makes these groups"
    return (*that_apply([(bool(axes), groups)]), *deepspeed_json.not_expressed(plan))
