"""The file systems that checkpoints lie on."""

from graphft.runtime.fs.base import FS, Writer
from graphft.runtime.fs.by_url import FsspecFS, HDFSClient, file_system
from graphft.runtime.fs.local import LocalFS

__all__ = ["FS", "FsspecFS", "HDFSClient", "LocalFS", "Writer", "file_system"]
