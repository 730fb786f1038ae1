from __future__ import annotations

import sys

from flopwright.executor.launch.commands import (
    rank_environment,
    torchrun_arguments,
    torchrun_command,
)


def test_torchrun_reads_the_arguments_as_meant() -> None:
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(
        list(torchrun_arguments("out/request.json", nproc_per_node=4, log_dir="out/logs"))
    )
    assert parsed.standalone
    assert parsed.local_addr == "127.0.0.1"
    assert parsed.nproc_per_node == "4"
    assert parsed.max_restarts == 0
    assert parsed.log_dir == "out/logs"
    assert parsed.module
    assert parsed.training_script == "flopwright.executor.train.worker"
    assert parsed.training_script_args == ["out/request.json"]


def test_several_nodes_meet_at_the_given_place() -> None:
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(
        list(
            torchrun_arguments("r.json", nproc_per_node=8, nnodes=2, rendezvous="first-node:29500")
        )
    )
    assert not parsed.standalone
    assert (parsed.nnodes, parsed.rdzv_backend) == ("2", "c10d")
    assert parsed.rdzv_endpoint == "first-node:29500"


def test_the_command_is_a_function_of_its_arguments() -> None:
    first = torchrun_command("r.json", nproc_per_node=2)
    assert first == torchrun_command("r.json", nproc_per_node=2)
    assert first[:3] == (sys.executable, "-m", "torch.distributed.run")


def test_the_environment_keeps_what_the_user_set() -> None:
    base = {"OMP_NUM_THREADS": "7", "PATH": "/bin"}
    environment = rank_environment(base, "cpu")
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["PATH"] == "/bin"
    assert environment["DS_ACCELERATOR"] == "cpu"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert base == {"OMP_NUM_THREADS": "7", "PATH": "/bin"}
    assert rank_environment({}, "cpu")["OMP_NUM_THREADS"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in rank_environment({}, "cuda")
