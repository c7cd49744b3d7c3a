"""A real HDFS of one NameNode and one DataNode on loopback, if `make hdfs` has got it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import until

HOME = Path(__file__).parents[2] / ".hdfs"
MISSING = "" if (HOME / "libhdfs.so").exists() and importlib.util.find_spec("pyarrow") else "no HDFS is here: make hdfs"
_OPENED = ("java.base/java.lang", "java.base/java.nio", "java.base/sun.nio.ch")
"""The parts of Java that Hadoop 2.7 uses, and newer ones hide."""
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


def _run(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    opened = [option for part in _OPENED for option in ("--add-opens", f"{part}=ALL-UNNAMED")]
    command = ["java", *opened, "-Xmx256m", "-cp", f"{folder}/conf:{HOME}/*", f"org.apache.hadoop.hdfs.server.{name}"]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen([*command, *arguments], stdout=log, stderr=log, cwd=folder)


@contextmanager
def hdfs_server(folder: Path) -> Iterator[int]:
    """Yields its port. The environment of this process has what pyarrow needs from then on: it loads a JVM, once."""
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    for name in ("hdfs", "datanode"):  # of the servers' pages, which nobody looks at
        (folder / "conf" / "webapps" / name).mkdir(parents=True)
    values = ((name, value.format(port=port, folder=folder)) for name, value in _SITE.items())
    site = "".join(f"<property><name>{name}</name><value>{value}</value></property>" for name, value in values)
    (folder / "conf" / "log4j.properties").write_text(_LOGGING)
    for name in ("core-site.xml", "hdfs-site.xml"):
        (folder / "conf" / name).write_text(f"<configuration>{site}</configuration>")
    _run(folder, "namenode.NameNode", "-format", "-force").wait(120)
    processes = [_run(folder, name) for name in ("namenode.NameNode", "datanode.DataNode")]
    log = folder / "datanode.DataNode.log"
    try:
        until(lambda: "successfully registered with NN" in log.read_text(errors="replace"))
        yield port
    finally:
        for process in processes:
            process.kill()
            process.wait()
