"""Is a file on a network file system? There SQLite's locks do not hold, and writers lose data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from flopwright.errors import InputError, Violation

MOUNTS: Final = Path("/proc/self/mounts")
# File systems that several machines share; fuse ones by the name behind "fuse.".
NETWORK: Final = frozenset(
    {
        "nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "afs", "ncpfs", "coda",
        "lustre", "gpfs", "mmfs", "beegfs", "ceph", "glusterfs", "panfs", "wekafs", "pvfs2",
        "orangefs", "gfs", "gfs2", "ocfs2", "acfs", "vastnfs", "juicefs", "sshfs", "s3fs",
        "gcsfuse", "goofys", "rclone", "davfs", "davfs2", "mfs", "moosefs", "quobyte", "cephfs",
        "ceph-fuse", "lizardfs", "saunafs", "seaweedfs", "alluxio-fuse", "dfuse", "daos",
        "blobfuse", "blobfuse2", "mount-s3", "mountpoint-s3", "s3ql", "objectivefs", "cunofs",
        "curlftpfs", "hdfs", "fuse_dfs", "mfsmount", "weed", "xtreemfs",
    }
)  # fmt: skip


def network_file_system(path: Path, mounts: Path = MOUNTS) -> str | None:
    """Returns the type of the network file system that `path` lies on, None of a local one.

    Args:
        path: need not exist.
        mounts: the system's table of mounts; a system without one is taken for local.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    target = path.expanduser().absolute()
    while not target.exists() and target != target.parent:
        target = target.parent
    place = target.resolve()
    best, kind = -1, ""
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(_unescaped(fields[1]))
        # of mounts over each other the last one counts
        if (point == place or point in place.parents) and len(point.parts) >= best:
            # a fuse program that names no type stands as the device
            plain = fields[2] == "fuse"
            best, kind = len(point.parts), f"fuse.{fields[0]}" if plain else fields[2]
    name = re.split("[:#@]", kind.removeprefix("fuse.").lower())[0]
    return kind if name in NETWORK else None


def _unescaped(text: str) -> str:
    """Returns a mount point with its octal escapes undone: a space is written as 040."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text


def refuse_network_file(path: Path, mounts: Path | None = None) -> None:
    """Raises InputError where a SQLite file would lie on a network file system."""
    kind = network_file_system(path, mounts or MOUNTS)
    if kind is None:
        return
    raise InputError(
        Violation(
            field="store",
            value=str(path),
            rule=f"a SQLite file on a network file system ({kind}): its locks do not hold there, "
            "and writers lose each other's records",
            nearest_fix="use PostgreSQL (FLOPWRIGHT_STORE=postgresql://user@host/name), or a "
            "local file and 'flopwright store export'",
        )
    )
