"""The file systems that checkpoints lie on."""

from graphft.runtime.fs.base import FS, Writer
from graphft.runtime.fs.by_url import FsspecFS, file_system
from graphft.runtime.fs.local import LocalFS

__all__ = ["FS", "FsspecFS", "LocalFS", "Writer", "file_system"]
