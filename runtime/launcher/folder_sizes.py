"""What a job takes on the disk, or in its storage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from graphft.runtime.fs import FS

PARTS = ("checkpoints", "metrics", "logs", "etcd")
"""The rest is "other": the job, its data, its model."""


def disk_bytes(path: Path) -> int:
    """What a file takes on the disk, or all files below a folder: etcd's are mostly holes. What cannot be looked at, or
    is deleted meanwhile, counts as nothing."""
    return sum(_blocks(Path(folder, name)) for folder, _, names in os.walk(path) for name in names) or _blocks(path)


def sizes_of(folder: Path) -> dict[str, int]:
    """Bytes by part, and their `total`."""
    return _summed((path.name, disk_bytes(path)) for path in _inside(folder))


def sizes_in(fs: FS, path: str) -> dict[str, int]:
    """The same of a storage. Raises OSError."""
    return _summed((PurePosixPath(name).parts[0], size) for name, size in fs.sizes(path).items())


def _summed(found: Iterator[tuple[str, int]]) -> dict[str, int]:
    sizes = dict.fromkeys((*PARTS, "other"), 0)
    for name, size in found:
        sizes[name if name in PARTS else "other"] += size
    return sizes | {"total": sum(sizes.values())}


def _inside(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:
        return


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0
