"""Probed machines as clusters in the user's own folder, so that they can be chosen by name."""

from __future__ import annotations

import re
from pathlib import Path

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.simulator.calibration.files import own_folder, write_atomically
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.load import dump_yaml, load_cluster

_OTHER = re.compile(r"[^A-Za-z0-9._-]+")


def machines_folder() -> Path:
    """Returns the folder of the user's probed machines (it may not exist yet)."""
    return own_folder().parent / "machines"


def save_machine(cluster: ClusterSpec) -> Path:
    """Writes a probed machine and returns where it stands; a newer probe takes its place."""
    name = _OTHER.sub("_", cluster.name).strip(".") or "machine"
    path = machines_folder() / f"{name}.yaml"
    write_atomically(path, dump_yaml(cluster, header="Written by flopwright probe."))
    return path


def machine_names() -> list[str]:
    """Returns the names of the user's probed machines, sorted."""
    return sorted(p.stem for p in machines_folder().glob("*.yaml"))


def load_machine(name: str) -> ClusterSpec:
    """Returns a probed machine.

    Raises:
        InputError: no such machine, or its file is no cluster.
    """
    if name not in machine_names():
        raise InputError(
            Violation(
                field="cluster",
                value=repr(name),
                rule="no such machine was probed here",
                nearest_fix=did_you_mean(name, machine_names()) or "run flopwright probe",
            )
        )
    return load_cluster(machines_folder() / f"{name}.yaml")
