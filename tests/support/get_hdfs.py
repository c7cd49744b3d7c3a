"""Gets what a real HDFS needs into a folder, once: `make hdfs`. Java and a C compiler are there.

PyPI has no Hadoop, but two old packages carry parts of it: pyspark 2.4 the jars of Hadoop 2.7 (NameNode and DataNode
are in them), pydoop the source of libhdfs, by which pyarrow reaches them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

JARS, LIBRARY = "pyspark==2.4.8", "pydoop==2.0.0"
SETUPTOOLS = "setuptools==69.5.1"
"""Their set-up scripts need one that old."""
WANTED = (
    "hadoop-common", "hadoop-hdfs", "hadoop-auth", "hadoop-annotations", "commons-", "guava", "jetty-", "javax.servlet",
    "javax.ws.rs", "jsp-api", "log4j-1", "slf4j-", "protobuf-java", "netty-", "htrace", "xmlenc", "xerces",
    "jackson-core", "jackson-mapper", "leveldbjni", "jsr305", "gson", "http",
)  # fmt: skip
SOURCES = (
    "hdfs.c", "jni_helper.c", "exception.c", "common/htable.c", "os/posix/mutexes.c", "os/posix/thread_local_storage.c",
)  # fmt: skip
INCLUDES = (".", "include", "include/hdfs", "os", "os/posix", "common")


def get(target: Path) -> None:
    java = java_home()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        pip = [sys.executable, "-m", "pip"]
        subprocess.run(
            [*pip, "install", "-qq", "--no-deps", "--target", work / "tools", SETUPTOOLS, "wheel"], check=True
        )
        download = [*pip, "download", "-qq", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", work]
        environment = {**os.environ, "PYTHONPATH": str(work / "tools"), "JAVA_HOME": str(java)}
        subprocess.run([*download, JARS, LIBRARY], check=True, env=environment)
        for archive in work.glob("*.tar.gz"):
            with tarfile.open(archive) as tar:
                tar.extractall(work, filter="data")
        (jars,), (source,) = work.glob("pyspark-*/deps/jars"), work.glob("pydoop-*/src/libhdfs")
        new = work / "hdfs"
        new.mkdir()
        for jar in jars.iterdir():
            if jar.name.startswith(WANTED):
                shutil.copy(jar, new)
        includes = [*INCLUDES, str(java / "include"), str(java / "include/linux")]
        server = java / "lib" / "server"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O2", "-w", *(f"-I{path}" for path in includes), "-o", new / "libhdfs.so",
             *SOURCES, f"-L{server}", "-ljvm", f"-Wl,-rpath,{server}", "-lpthread"],
            check=True, cwd=source,
        )  # fmt: skip
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(new, target)


def java_home() -> Path:
    javac = shutil.which("javac")
    if javac is None:
        sys.exit("HDFS needs Java; on Debian: apt-get install openjdk-17-jdk-headless")
    return Path(javac).resolve().parent.parent


if __name__ == "__main__":
    get(Path(sys.argv[1]))
