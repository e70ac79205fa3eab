"""What a directory's storage is like, and how many files a checkpoint there should have."""

from __future__ import annotations

from pathlib import Path

from hpctrain.io.plan import FileKind

PARALLEL = {
    "lustre",
    "gpfs",
    "beegfs",
    "fhgfs",
    "panfs",
    "weka",
    "wekafs",
    "cephfs",
    "ceph",
    "orangefs",
}
"""File systems that many nodes write to at once."""
_MANY = 256
"""Files of one checkpoint above which creating them costs more than sharing them."""


def file_system(path: Path) -> str:
    """Type of the file system of a path (``ext4``, ``lustre``), as the kernel names it.

    The path or the nearest directory above it that exists counts; empty where it cannot be
    told.
    """
    here = path.absolute()
    while not here.exists() and here != here.parent:
        here = here.parent
    here = here.resolve()
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        mount = fields[1].encode().decode("unicode_escape")
        inside = mount == "/" or here == Path(mount) or str(here).startswith(mount + "/")
        # A later mount on the same place hides the earlier one.
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind


def files_for(path: Path, ranks: int, nodes: int) -> FileKind:
    """One file, one a node or one a rank, where nobody has measured.

    On the file system of one machine a shared file is as fast as many. On a parallel one each
    rank gets a file, so that no lock is shared, until there are so many that the metadata
    server becomes what everyone waits for.
    """
    if ranks == 1 or (file_system(path) not in PARALLEL and nodes == 1):
        return "one"
    return "rank" if ranks <= _MANY else "node"
