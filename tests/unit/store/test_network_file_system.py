"""A SQLite file on a network file system is refused, with PostgreSQL as the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

import flopwright.store.network_fs as network_fs
from flopwright.errors import InputError
from flopwright.store import open_store
from flopwright.store.network_fs import network_file_system


def mounts(folder: Path, *lines: str) -> Path:
    table = folder / "mounts"
    table.write_text("rootfs / ext4 rw 0 0\n" + "".join(f"{x}\n" for x in lines))
    return table


@pytest.mark.parametrize(
    "kind",
    [
        "nfs",
        "nfs4",
        "cifs",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "fuse.sshfs",
        "fuse.juicefs",
        "fuse.ceph-fuse",
    ],
)
def test_network_file_systems_are_known(tmp_path: Path, kind: str) -> None:
    home = tmp_path / "my home"
    home.mkdir()
    point = str(home).replace(" ", "\\040")
    table = mounts(tmp_path, f"server:/x {point} {kind} rw 0 0")
    assert network_file_system(home / "deep" / "store.sqlite", table) == kind
    assert network_file_system(tmp_path / "store.sqlite", table) is None


def test_a_fuse_program_without_a_type_is_known_by_its_device(tmp_path: Path) -> None:
    for device, wanted in (("blobfuse2", "fuse.blobfuse2"), ("s3fs#b", "fuse.s3fs#b")):
        table = mounts(tmp_path, f"{device} {tmp_path} fuse rw 0 0")
        assert network_file_system(tmp_path / "s.sqlite", table) == wanted
    local = mounts(tmp_path, f"encfs {tmp_path} fuse rw 0 0")
    assert network_file_system(tmp_path / "s.sqlite", local) is None


def test_the_nearest_mount_counts(tmp_path: Path) -> None:
    local = tmp_path / "shared" / "scratch"
    local.mkdir(parents=True)
    table = mounts(
        tmp_path,
        f"server:/x {tmp_path / 'shared'} nfs4 rw 0 0",
        f"/dev/nvme0n1 {local} xfs rw 0 0",
        f"/dev/sdb {tmp_path / 'sharedother'} ext4 rw 0 0",
    )
    assert network_file_system(tmp_path / "shared" / "s.sqlite", table) == "nfs4"
    assert network_file_system(local / "s.sqlite", table) is None


@pytest.mark.parametrize("kind", ["ext4", "overlay", "tmpfs", "fuse.portal", "9p", "btrfs"])
def test_local_ones_are_not(tmp_path: Path, kind: str) -> None:
    assert network_file_system(tmp_path, mounts(tmp_path, f"x {tmp_path} {kind} rw 0 0")) is None


def test_a_system_without_a_table_is_taken_for_local(tmp_path: Path) -> None:
    assert network_file_system(tmp_path, tmp_path / "none") is None


def test_a_link_into_a_network_folder_is_seen_through(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "link").symlink_to(shared)
    table = mounts(tmp_path, f"s:/x {shared} nfs rw 0 0")
    assert network_file_system(tmp_path / "link" / "s.sqlite", table) == "nfs"


def test_the_store_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_fs, "MOUNTS", mounts(tmp_path, f"s:/x {tmp_path} nfs4 rw 0 0"))
    with pytest.raises(InputError, match=r"nfs4.*postgresql://") as caught:
        open_store(f"sqlite:///{tmp_path}/team/store.sqlite")
    assert caught.value.violations[0].field == "store"
    assert not (tmp_path / "team").exists()
