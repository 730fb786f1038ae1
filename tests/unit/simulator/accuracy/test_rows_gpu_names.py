"""Every spelling of a processor means the part it names."""

from __future__ import annotations

import pytest

from flopwright.simulator.accuracy.gpu_names import AMD, canonical_gpu, is_out_of_scope
from flopwright.simulator.hardware.nodes.types import usual_node_type
from flopwright.spec.load import GPU_CATALOG, catalog_names

SPELLINGS = {
    "a100_sxm_40gb": ("A100-40GB", "A100-SXM4-40GB", "NVIDIA A100 40GB", "p4d.24xlarge"),
    "a100_sxm_80gb": ("A100", "A100-SXM", "A100-80GB", "NVIDIA A100-SXM4-80GB", "a100_80gb"),
    "a800_sxm_80gb": ("A800-80GB", "A800", "NVIDIA A800-SXM4-80GB"),
    "h100_sxm": (
        "H100", "H100-80GB", "H100 SXM", "NVIDIA H100 80GB HBM3", "h100_sxm5", "8xH100",
    ),
    "h100_96gb_hbm2e": ("H100-96GB HBM2e 500W", "H100 96GB", "H100 (96 GB HBM2e)"),
    "h200_sxm": ("H200", "H200-SXM-141GB", "NVIDIA H200"),
    "h800_sxm": ("H800", "H800-80GB", "NVIDIA H800"),
    "h20": ("H20", "H20-96GB", "NVIDIA H20"),
    "gh200": ("GH200", "GH200 480GB", "NVIDIA GH200"),
    "b200": ("B200", "B200-SXM-180GB", "NVIDIA B200"),
    "b300": ("B300", "B300-288GB"),
    "gb200": ("GB200", "GB200 NVL72", "NVIDIA GB200"),
    "gb300": ("GB300", "GB300 NVL72"),
    "mi300x": ("MI300X", "AMD Instinct MI300X", "MI300X-192GB"),
    "mi325x": ("MI325X", "AMD MI325X"),
    "mi355x": ("MI355X", "AMD Instinct MI355X"),
    "l40s": ("L40S", "NVIDIA L40S 48GB"),
    "rtx_4090": ("RTX 4090", "GeForce RTX 4090", "4090"),
    "a6000": ("A6000", "RTX A6000", "NVIDIA RTX A6000"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("spelling", "name"), [(s, name) for name, all_of in SPELLINGS.items() for s in all_of]
)
def test_a_spelling_means_one_part_of_the_catalog(spelling: str, name: str) -> None:
    assert canonical_gpu(spelling) == name
    assert not is_out_of_scope(spelling)


def test_every_name_has_a_gpu_and_a_node() -> None:
    known = set(catalog_names(GPU_CATALOG))
    for name in SPELLINGS:
        assert name in known
        assert usual_node_type(name).gpu == name
    assert set(SPELLINGS) >= AMD


@pytest.mark.parametrize(
    "spelling",
    ["TPU v5e", "TPU v6e", "T4 (4x g4dn.12xlarge, 16 GPUs)", "V100", "Tesla V100-SXM2", "CPU",
     "Gaudi 2", "Ascend 910B", "Trainium2"],
)  # fmt: skip
def test_other_processors_are_out_of_scope(spelling: str) -> None:
    assert is_out_of_scope(spelling)
    assert canonical_gpu(spelling) is None


@pytest.mark.parametrize("spelling", ["", "???", "Radeon", "X9000", "RTX 3080"])
def test_an_unknown_part_has_no_name(spelling: str) -> None:
    assert canonical_gpu(spelling) is None
    assert not is_out_of_scope(spelling)
