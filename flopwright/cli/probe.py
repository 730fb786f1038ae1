"""`flopwright probe`: measure this machine; a cluster file and a first calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flopwright.plan.file import PlanFile
    from flopwright.report.probe import ProbeReport
    from flopwright.spec.scenario import Scenario

_DEFAULT_SCENARIO = "kimi_k2_mini_2cpu_fp32"
_FILES = {"probe": "probe.json", "cluster": "cluster.yaml", "calibration": "calibration.yaml"}


def probe(
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Ranks; default: one a GPU, or a core.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for cluster.yaml, calibration.yaml, probe.json.")
    ] = Path("machine"),
    budget_s: Annotated[
        float, typer.Option("--budget", min=1, help="Seconds to measure for.")
    ] = 60.0,
    scenario: Annotated[
        str,
        typer.Option("--scenario", help="Measure the shapes that this scenario's model needs."),
    ] = _DEFAULT_SCENARIO,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine: matrix products, memory, collectives between local processes.

    All ranks measure at the same time, so that what they share is shared as in training.

    Example: flopwright probe --nproc 2 --out machine
    """
    import importlib.util
    import tempfile

    from flopwright.errors import InputError, Violation
    from flopwright.executor.launch.machine import find_machine
    from flopwright.executor.measure.probe_request import ProbeRequest, run_probe_ranks
    from flopwright.planner.export.folder import check_folder, write_folder
    from flopwright.simulator.calibration.cluster_file import cluster_from_probe, link_name
    from flopwright.simulator.calibration.files import save_calibration
    from flopwright.simulator.calibration.fit_probe import fit_probe
    from flopwright.spec.load import dump_yaml, load_scenario

    wanted = load_scenario(scenario)
    files = {name: out / f for name, f in _FILES.items()}
    check_folder(out.resolve(), _FILES.values(), force=True)
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            Violation(
                rule="probing runs the model's own ops, which need torch",
                nearest_fix="pip install 'flopwright[train]'",
            )
        )
    machine = find_machine()
    ranks = nproc or machine.gpus or machine.cores
    if machine.gpus and ranks > machine.gpus:
        raise InputError(
            Violation(
                field="nproc",
                value=str(ranks),
                rule="there is one rank a GPU",
                limit=str(machine.gpus),
                nearest_fix=f"use --nproc {machine.gpus}",
            )
        )
    request = ProbeRequest(
        device="cuda" if machine.gpus else "cpu",
        plans=_shapes(wanted, ranks),
        budget_s=budget_s,
    )

    def tell(what: str) -> None:
        if not as_json:
            typer.echo(f"  {what}", err=True)

    with tempfile.TemporaryDirectory(prefix="flopwright-probe-") as folder:
        report = run_probe_ranks(request, ranks, Path(folder), tell)
    cluster, calibration = cluster_from_probe(report), fit_probe(report, link_name(report))
    contents = {
        "probe": report.model_dump_json(exclude_none=True, indent=1),
        "cluster": dump_yaml(cluster, header="Written by flopwright probe."),
        "calibration": dump_yaml(calibration, header=calibration.source),
    }
    written = {_FILES[name]: text.encode() for name, text in contents.items()}
    write_folder(out.resolve(), written, force=True)
    save_calibration(calibration)  # by its id, so that other verbs find it
    if as_json:
        data = {
            "probe": report.to_data(),
            "cluster": cluster.to_data(),
            "calibration": calibration.id,
            "files": {name: str(path) for name, path in files.items()},
        }
        typer.echo(json.dumps(data))
        return
    _show(report)
    typer.echo(f"calibration {calibration.id}; files: {', '.join(map(str, files.values()))}")


def _shapes(scenario: Scenario, ranks: int) -> tuple[PlanFile, ...]:
    """Returns plans whose shapes are worth measuring: experts whole, and split over the ranks."""
    from flopwright.plan.parallel import ParallelPlan
    from flopwright.spec.load import make_plan_file

    sizes = scenario.search.micro_batch_size or (1,)
    moe = scenario.model.moe
    splits = {1}
    if moe is not None and ranks > 1 and moe.num_experts % ranks == 0:
        splits.add(ranks)
    return tuple(
        make_plan_file(
            scenario, ParallelPlan(dp_shard=ranks, ep=ep, micro_batch_size=size), f"ep{ep}"
        )
        for size in sizes
        for ep in sorted(splits)
    )


def _show(report: ProbeReport) -> None:
    """Prints the machine, and tables of rates and collectives."""
    import sys

    from rich.console import Console
    from rich.table import Table

    from flopwright.simulator.calibration.fit_probe import copy_bytes_per_s
    from flopwright.units import show_bytes, show_seconds

    where = report.fingerprint
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(
        f"{where.gpu or where.processor}: {where.world_size} ranks on {where.num_cores} cores, "
        f"{where.threads_per_rank} thread(s) a rank, {show_bytes(where.memory_bytes)} of memory"
    )
    console.print(
        f"memory copy {copy_bytes_per_s(report) / 1e9:.3g} GB/s a rank (read + write); "
        f"one op costs {show_seconds(report.host_floor_s)}"
    )
    products = Table(title="matrix products and attention (median; all ranks at once)")
    for column in (
        "op",
        "dtype",
        "phase",
        "m x k x n",
        "batch",
        "time",
        "GFLOP/s",
        "p90 / median",
    ):
        products.add_column(
            column, justify="left" if column in {"op", "dtype", "phase"} else "right"
        )
    for p in report.operators:
        if p.flops:
            products.add_row(
                p.name, p.dtype, p.phase, f"{p.m:g} x {p.k:g} x {p.n:g}", f"{p.batch:g}",
                show_seconds(p.seconds), f"{p.flops / p.seconds / 1e9:.3g}",
                f"{p.seconds_p90 / p.seconds:.2f}",
            )  # fmt: skip
    console.print(products)
    if report.collectives:
        _show_collectives(report, console)


def _show_collectives(report: ProbeReport, console: object) -> None:
    from rich.console import Console
    from rich.table import Table

    from flopwright.units import show_seconds

    assert isinstance(console, Console)
    table = Table(title="collectives between local ranks")
    for column in ("collective", "ranks", "payload (KiB)", "median", "quickest", "GB/s"):
        table.add_column(column, justify="left" if column == "collective" else "right")
    for c in report.collectives:
        table.add_row(
            c.collective, str(c.ranks), f"{c.nbytes / 1024:,.0f}", show_seconds(c.seconds),
            show_seconds(c.seconds_min), f"{c.nbytes / c.seconds / 1e9:.3g}",
        )  # fmt: skip
    console.print(table)
