from __future__ import annotations

from pathlib import Path

from flopwright.report.metrics import Fingerprint
from flopwright.report.probe import CollectivePoint, OperatorPoint, ProbeReport
from flopwright.simulator.calibration.cluster_file import cluster_from_probe
from flopwright.spec.load import dump_yaml, load_cluster


def report(**changes: object) -> ProbeReport:
    fingerprint = Fingerprint(
        machine="m",
        processor="Intel(R) Xeon(R) Gold 6230 CPU",
        num_cores=2,
        world_size=2,
        threads_per_rank=1,
        memory_bytes=16 * 2**30,
        python="3.11",
        tool_version="0",
        gpu=changes.pop("gpu", None),  # type: ignore[arg-type]
    )
    product = {"kind": "gemm", "name": "linear", "seconds": 1.0, "seconds_p90": 1.0}
    copy = OperatorPoint(
        kind="memory_bound",
        name="copy",
        dtype="fp32",
        moved_bytes=8e9,
        seconds=1.0,
        seconds_min=1.0,
        seconds_p90=1.0,
    )
    values: dict[str, object] = {
        "created": "2026-01-02T03:04:05+00:00",
        "fingerprint": fingerprint,
        "host_floor_s": 3e-6,
        "operators": (
            OperatorPoint.model_validate(
                product | {"dtype": "fp32", "flops": 9e10, "seconds_min": 0.9}
            ),
            OperatorPoint.model_validate(
                product | {"dtype": "bf16", "flops": 4e11, "seconds_min": 1.0}
            ),
            copy,
        ),
        "collectives": tuple(
            CollectivePoint(
                collective="send_recv",
                ranks=2,
                nbytes=n,
                seconds=1e-4 + n / 2e9,
                seconds_min=1e-4 + n / 2e9,
                seconds_p90=1.0,
            )
            for n in (4096.0, 65536.0, 2.0**20, 2.0**24)
        ),
    }
    return ProbeReport.model_validate(values | changes)


def test_the_cluster_file_says_what_was_measured_and_loads_back(tmp_path: Path) -> None:
    cluster = cluster_from_probe(report())
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_yaml(cluster, header="by a test"))
    assert load_cluster(path) == cluster
    gpu = cluster.node.gpu
    assert gpu.name == "intel_xeon_gold_6230_cpu"
    assert gpu.kind == "cpu"
    assert gpu.peak_flops_per_s == {"fp32": 1e11, "bf16": 4e11}  # of the quickest run
    assert gpu.hbm_bytes == 8 * 2**30
    assert gpu.hbm_bytes_per_s == 8e9
    assert (cluster.num_gpus, cluster.node.cores) == (2, 2)
    assert cluster.node.link.name == "loopback"
    assert abs(cluster.node.link.bytes_per_s / 2e9 - 1) < 0.1
    assert abs(cluster.node.link.latency_s / 1e-4 - 1) < 0.2
    assert "measured by flopwright probe" in gpu.sources["peak_flops"]
    assert set(gpu.sources) >= {"peak_flops", "hbm", "hbm_bandwidth", "launch_floor"}


def test_a_gpu_keeps_its_own_memory(tmp_path: Path) -> None:
    cluster = cluster_from_probe(report(gpu="NVIDIA H200", device_memory_bytes=139 * 2**30))
    assert cluster.node.gpu.kind == "cuda"
    assert cluster.node.gpu.hbm_bytes == 139 * 2**30
    assert cluster.node.link.name == "intra_node"


def test_one_rank_without_partners_still_gives_a_cluster() -> None:
    cluster = cluster_from_probe(report(collectives=()))
    assert "one rank has no partner" in cluster.node.link.source
