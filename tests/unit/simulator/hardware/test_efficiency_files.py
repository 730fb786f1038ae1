"""Fitted data carry where they come from, and too few numbers to rebuild a table from."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from flopwright.simulator.calibration.files import SHIPPED, read_calibration
from flopwright.spec.load import GPU_CATALOG, catalog_names, load_gpu

ROOT = Path(__file__).parents[4]
FILES = sorted(SHIPPED.glob("*.yaml"))


def _header(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_header_names_source_licence_and_change(path: Path) -> None:
    header = _header(path)
    for word in ("Source:", "Apache-2.0", "changed:"):
        assert word in header
    if path.stem == "cpu":
        return
    assert "AIConfigurator" in header
    assert "changed: fitted" in header
    commit = header.split("commit ")[1][:40]
    assert commit in (ROOT / "NOTICE").read_text(encoding="utf-8")


def _numbers_in(record: object) -> int:
    if isinstance(record, dict):
        return sum(_numbers_in(v) for v in record.values())
    if isinstance(record, list):
        return sum(_numbers_in(v) for v in record)
    return int(isinstance(record, (int, float)) and not isinstance(record, bool))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_no_table_could_be_rebuilt_from_it(path: Path) -> None:
    numbers: Counter[str] = Counter()
    for curve in read_calibration(path).curves:
        numbers[curve.kind] += _numbers_in(curve.model_dump(mode="json", exclude_defaults=True))
    assert max(numbers.values()) <= 200


@pytest.mark.parametrize("gpu", catalog_names(GPU_CATALOG))
def test_every_gpu_of_the_catalog_has_its_own_prior(gpu: str) -> None:
    assert (SHIPPED / f"{gpu}.yaml").is_file()


@pytest.mark.parametrize("gpu", catalog_names(GPU_CATALOG))
def test_every_number_of_a_gpu_has_a_source(gpu: str) -> None:
    data = yaml.safe_load((GPU_CATALOG / f"{gpu}.yaml").read_text(encoding="utf-8"))
    assert set(data["sources"]) == set(data) - {"name", "kind", "sources"}


def test_an_h800_computes_like_an_h100() -> None:
    h800, h100 = load_gpu("h800_sxm"), load_gpu("h100_sxm")
    cut = {"fp64"}  # export rules cut the double precision alone
    assert {k: v for k, v in h800.peak_flops_per_s.items() if k not in cut} == {
        k: v for k, v in h100.peak_flops_per_s.items() if k not in cut
    }
    a, b = (read_calibration(SHIPPED / f"{n}.yaml").curves for n in ("h800_sxm", "h100_sxm"))
    assert a == b
