"""A real HDFS of one NameNode and one DataNode on loopback, if `make hdfs` has got it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOME = Path(__file__).parents[2] / ".hdfs"
MISSING = "" if (HOME / "libhdfs.so").exists() and importlib.util.find_spec("pyarrow") else "no HDFS is here: make hdfs"
_OPENED = ("java.base/java.lang", "java.base/java.nio", "java.base/sun.nio.ch")
"""What Hadoop 2.7 uses of Java, and newer ones hide."""
_LOGGING = """log4j.rootLogger=INFO,err
log4j.appender.err=org.apache.log4j.ConsoleAppender
log4j.appender.err.target=System.err
log4j.appender.err.layout=org.apache.log4j.SimpleLayout
"""
_SITE = {
    "fs.defaultFS": "hdfs://127.0.0.1:{port}",
    "dfs.namenode.name.dir": "file://{folder}/name",
    "dfs.datanode.data.dir": "file://{folder}/data",
    "dfs.namenode.http-address": "127.0.0.1:0",
    "dfs.datanode.address": "127.0.0.1:0",
    "dfs.datanode.http.address": "127.0.0.1:0",
    "dfs.datanode.ipc.address": "127.0.0.1:0",
    "dfs.webhdfs.enabled": "false",
    "dfs.replication": "1",
    "dfs.namenode.safemode.extension": "0",
}


class HDFS:
    """`start` and `kill` may be called again and again: the files stay."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._processes = folder, list[subprocess.Popen[bytes]]()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._configure()
        self._run("namenode.NameNode", "-format", "-force").wait(120)

    def _configure(self) -> None:
        conf = self.folder / "conf"
        for name in ("hdfs", "datanode"):  # of the servers' pages, which nobody looks at
            (conf / "webapps" / name).mkdir(parents=True)
        values = ((name, value.format(port=self.port, folder=self.folder)) for name, value in _SITE.items())
        site = "".join(f"<property><name>{name}</name><value>{value}</value></property>" for name, value in values)
        (conf / "log4j.properties").write_text(_LOGGING)
        for name in ("core-site.xml", "hdfs-site.xml"):
            (conf / name).write_text(f"<configuration>{site}</configuration>")

    def _run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        opened = [option for part in _OPENED for option in ("--add-opens", f"{part}=ALL-UNNAMED")]
        command = ["java", *opened, "-Xmx256m", "-cp", f"{self.folder}/conf:{HOME}/*"]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, f"org.apache.hadoop.hdfs.server.{name}", *arguments], stdout=log, stderr=log, cwd=self.folder
            )

    def start(self) -> None:
        self._processes = [self._run("namenode.NameNode"), self._run("datanode.DataNode")]
        log, end = self.folder / "datanode.DataNode.log", time.monotonic() + 90
        before = self._registered(log)
        while self._registered(log) == before:
            assert all(process.poll() is None for process in self._processes), log.read_text()[-3000:]
            assert time.monotonic() < end, f"HDFS does not start: {log.read_text()[-3000:]}"
            time.sleep(0.1)

    def _registered(self, log: Path) -> int:
        return log.read_text(errors="replace").count("successfully registered with NN") if log.exists() else 0

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def hdfs_server(folder: Path) -> Iterator[HDFS]:
    """What pyarrow needs is in the environment of this process then, for good: it loads a JVM, once."""
    java = Path(shutil.which("java") or "").resolve().parent.parent
    conf = HOME / "client"
    conf.mkdir(exist_ok=True)
    (conf / "log4j.properties").write_text("log4j.rootLogger=OFF\n")
    os.environ |= {
        "JAVA_HOME": str(java),
        "CLASSPATH": ":".join([str(conf), *map(str, sorted(HOME.glob("*.jar")))]),
        "ARROW_LIBHDFS_DIR": str(HOME),
        "LIBHDFS_OPTS": "-Xmx256m -Xrs --add-opens=java.base/java.lang=ALL-UNNAMED",
    }
    server = HDFS(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
