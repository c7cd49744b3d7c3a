"""Files of this machine, or of what is mounted here."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from graphft.disk.fileio import PieceWriter, fsync, make_folder, replacing
from graphft.runtime.fs.base import FS

NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""The errors of file systems without hard links (FAT, some of FUSE)."""


class LocalFS(FS):
    """Everything that is written is fsynced, and so is its entry in the folder."""

    def ls_dir(self, path: str) -> list[str]:
        try:
            return sorted(entry.name for entry in Path(path).iterdir())
        except FileNotFoundError:
            return []

    def size(self, path: str) -> int | None:
        try:
            return Path(path).stat().st_size if not Path(path).is_dir() else None
        except FileNotFoundError:
            return None

    def stat(self, path: str) -> bool:
        return Path(path).exists()

    def open(self, path: str) -> BinaryIO:
        return Path(path).open("rb", 0)

    def mkdir(self, path: str) -> None:
        make_folder(Path(path))

    def writing(self, path: str) -> AbstractContextManager[PieceWriter]:
        return replacing(Path(path))

    def create(self, path: str, data: bytes) -> bool:
        target = Path(path)
        scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex}.new")
        with replacing(scratch) as file:
            file.write(data)
        try:
            os.link(scratch, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if target.exists():
                return False
            os.replace(scratch, target)  # two that come in the same moment are not told apart here
        finally:
            scratch.unlink(missing_ok=True)
            fsync(target.parent)
        return True

    def delete(self, path: str) -> None:
        if Path(path).is_dir():
            shutil.rmtree(Path(path))
        else:
            Path(path).unlink(missing_ok=True)
