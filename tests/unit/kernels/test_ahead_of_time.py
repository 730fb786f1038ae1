"""Every kernel compiled for four targets without a GPU, and the table that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from flopwright.kernels.aot import interpreting, signature
from flopwright.kernels.aot_entries import ENTRIES
from flopwright.kernels.launch import TARGETS, UnsupportedKernelError, recording
from flopwright.kernels.resources import COMPILED_FOR, Row, compile_row, render, rows

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kernels.md"
FOLDERS = PAGE.parents[1] / "kernels"


def _table_of(target: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    _, _, rest = text.partition(f"### {target}\n")
    return [line for line in rest.split("\n###")[0].splitlines() if line.startswith("|")]


@pytest.mark.slow
@pytest.mark.parametrize("target", COMPILED_FOR)
def test_every_kernel_compiles_and_the_table_says_what_it_takes(target: str) -> None:
    assert not interpreting()
    table = rows([target])
    for row in table:
        compile_row(row)
    found = [line for line in render(table).splitlines() if line.startswith("|")]
    assert found == _table_of(target), "renew it: benchmarks/kernel_resources.py --write"
    for row in table:
        if row.found is not None:
            assert row.found.shared_bytes <= TARGETS[target].shared_bytes


def test_every_folder_with_a_kernel_is_compiled() -> None:
    with_kernel = {p.parent.name for p in FOLDERS.glob("*/kernel.py")}
    assert with_kernel <= {group for group, _ in ENTRIES}


def test_e4m3_is_refused_by_name_where_the_card_has_none() -> None:
    from flopwright.kernels.fp8_quantize import kernel

    with (
        recording(TARGETS["sm_80"]) as noted,
        pytest.raises(UnsupportedKernelError, match="sm_80"),
    ):
        kernel.quantize(torch.empty(4, 256, dtype=torch.bfloat16, device="meta"))
    assert not noted.launches
    from flopwright.kernels.swiglu import kernel as gates

    kept = (torch.empty(4, 256, device="meta"), torch.empty(4, 2, device="meta"))
    with (
        recording(TARGETS["sm_86"]) as noted,
        pytest.raises(UnsupportedKernelError, match="sm_86"),
    ):
        gates.backward_fp8(torch.empty(4, 256, device="meta"), kept, kept)
    assert not noted.launches
    refused = [r for r in rows(["sm_80"]) if r.refused]
    assert {r.group for r in refused} == {"fp8_quantize", "gated_fp8"}


def test_the_compiler_refuses_e4m3_there_too() -> None:
    """What the wrapper refuses would not compile either."""
    (row,) = rows(["sm_90"], ["fp8_quantize"])[:1]
    row.target = "sm_80"
    with pytest.raises(Exception, match=r"fp8e4nv|CompilationError"):
        compile_row(row)


def test_the_launch_is_specialised_as_triton_does() -> None:
    from flopwright.kernels.moe_permute import kernel

    x = torch.empty(7, 48, dtype=torch.bfloat16, device="meta")
    order = torch.empty(7, dtype=torch.int64, device="meta")
    with recording(TARGETS["sm_90"]) as noted:
        kernel.permute(x, order, 1)
    (launch,) = noted.launches
    types, constants, attributes = signature(launch)
    assert types["x_ptr"] == "*bf16"
    assert types["order_ptr"] == "*i64"
    assert constants == {"top_k": 1, "BLOCK": 64}  # a one is a constant
    names = [p.name for p in launch.kernel.params]
    # 48 is a multiple of 16, and pointers are aligned.
    assert {names[i] for (i,) in attributes} == {
        "x_ptr", "order_ptr", "y_ptr", "width", "x_stride"
    }  # fmt: skip


def test_rows_of_one_kernel_name_all_models() -> None:
    found: list[Row] = rows(["sm_90"], ["attention"])
    models = {m for row in found for m in row.models}
    assert models == {"K2", "K3", "Llama-70B"}
    assert len(found) < sum(len(row.models) for row in found)
