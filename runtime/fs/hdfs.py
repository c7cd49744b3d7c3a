"""Hadoop's distributed file system, by pyarrow."""

from __future__ import annotations

from typing import Any

from graphft.errors import GraphftError
from graphft.runtime.fs.by_url import RenamingFS


class HDFSClient(RenamingFS):
    """Hadoop's file system, by the NameNode's address. (`hdfs://` URLs are the same.)

    Args:
        host: Of the NameNode; "default" takes `fs.defaultFS` of Hadoop's own configuration.
        port: Of the NameNode.
        user: Whom to be there; by default the user of this process.
        options: Further ones of `pyarrow.fs.HadoopFileSystem` (`replication`, `kerb_ticket`, `extra_conf`, ...).

    Needs Hadoop's client and Java on this machine (`HADOOP_HOME`, `CLASSPATH`, as pyarrow's documentation says). Raises
    GraphftError[storage-url] without them.
    """

    def __init__(self, host: str = "default", port: int = 0, user: str | None = None, **options: Any) -> None:
        try:
            from fsspec.implementations.arrow import ArrowFSWrapper
            from pyarrow.fs import HadoopFileSystem

            wrapped = ArrowFSWrapper(HadoopFileSystem(host, port, user=user, **options))
        except (ImportError, OSError) as error:
            raise GraphftError(
                f"HDFS at {host}:{port} cannot be used: {error}",
                rule="storage-url",
                help="install Java and Hadoop's client, and set HADOOP_HOME and CLASSPATH",
            ) from error
        super().__init__(wrapped)
