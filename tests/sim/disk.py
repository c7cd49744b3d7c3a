"""A disk in memory, and what `os`, `shutil` and `pathlib.Path` are on it.

What is written is visible at once, and lasts over the death of a process. What lasts when the machine loses its power
is only what was fsynced: a file's bytes by its own fsync, its name by that of its folder. A process may die between any
two calls, and in the middle of a write.
"""

from __future__ import annotations

import errno
import io
import os as real_os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, ClassVar

from tests.sim.threads import BEGAN
from tests.sim.world import Died, World

FIRST_DESCRIPTOR = 1 << 20


@dataclass(eq=False)
class Node:
    """A file or a folder. `lasting`: what a loss of power leaves; None: nothing, as it was never fsynced."""

    folder: bool
    data: bytearray = field(default_factory=bytearray)
    lasting: bytes | None = None
    names: dict[str, Node] = field(default_factory=dict)
    lasting_names: dict[str, Node] = field(default_factory=dict)
    written: float = 0.0


class Disk:
    """`trouble`: what a write raises now, if anything. `slow`: seconds that a write or an fsync may take at most."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.root = Node(folder=True)
        self.trouble: Callable[[], OSError | None] = lambda: None
        self.slow = 0.002
        self.open: dict[int, Node] = {}

    # -- access -----------------------------------------------------------------------------------------------------

    def find(self, path: SimPath) -> Node:
        node = self.root
        for name in path.parts[1:]:
            if not node.folder:
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
            if name not in node.names:
                raise FileNotFoundError(errno.ENOENT, "not there", str(path))
            node = node.names[name]
        return node

    def change(self, what: str, takes: float = 0.0) -> None:
        """The running process is about to change something: it may die, or be told that it cannot be done."""
        world = self.world
        world.effect(what)
        if takes and world.current is not None:
            world.sleep(world.random.uniform(0, takes))
        error = self.trouble()
        if error is not None:
            raise error

    def make(self, path: SimPath, node: Node) -> Node:
        self.find(path.parent).names[path.name] = node
        node.written = self.world.now
        return node

    def lose_power(self) -> None:
        """Every process has ended before. What was not fsynced may be there, or not, or in part."""
        self.open.clear()
        self._forget(self.root)

    def _forget(self, node: Node) -> None:
        random = self.world.random
        if not node.folder:
            lasting = bytes(node.lasting or b"")
            lasts = len(lasting)
            if lasts > len(node.data):  # it was cut, and that may be lost as well
                node.data[:] = random.choice((lasting, bytes(node.data)))
            else:
                kept = random.choice((lasts, lasts, random.randint(lasts, len(node.data))))
                del node.data[kept:]
            node.lasting = bytes(node.data)
            return
        for name in sorted(node.names.keys() | node.lasting_names.keys()):
            now, before = node.names.get(name), node.lasting_names.get(name)
            left = random.choice((now, before)) if now is not before else now
            if left is None:
                node.names.pop(name, None)
            else:
                node.names[name] = left
                self._forget(left)
        node.lasting_names = dict(node.names)

    # -- as os and shutil know it -----------------------------------------------------------------------------------

    def os_open(self, path: SimPath, flags: int, mode: int = 0o666) -> int:
        if flags & real_os.O_CREAT:
            self.change("create")
            if path.name in self.find(path.parent).names:
                if flags & real_os.O_EXCL:
                    raise FileExistsError(errno.EEXIST, "is there", str(path))
            else:
                self.make(path, Node(folder=False))
        descriptor = FIRST_DESCRIPTOR + len(self.open)
        while descriptor in self.open:
            descriptor += 1
        self.open[descriptor] = self.find(path)
        return descriptor

    def write(self, descriptor: int, data: Any) -> int:
        node, new = self.open[descriptor], bytes(data)
        try:
            self.change("write", self.slow)
        except Died:
            node.data += new[: len(new) // 2]
            raise
        node.data += new
        node.written = self.world.now
        return len(new)

    def fsync(self, descriptor: int) -> None:
        self.change("fsync", self.slow)
        node = self.open[descriptor]
        if node.folder:
            node.lasting_names = dict(node.names)
        else:
            node.lasting = bytes(node.data)

    def close(self, descriptor: int) -> None:
        self.open.pop(descriptor, None)

    def replace(self, old: SimPath, new: SimPath) -> None:
        self.change("rename")
        node = self.find(old.parent).names.pop(old.name)
        self.find(new.parent).names[new.name] = node

    def rmtree(self, path: SimPath, ignore_errors: bool = False) -> None:
        try:
            folder = self.find(path)
            for name in sorted(folder.names):
                self.change("delete")
                folder.names.pop(name, None)
            self.change("delete")
            self.find(path.parent).names.pop(path.name, None)
        except OSError:
            if not ignore_errors:
                raise


class SimPath(PurePosixPath):
    """`pathlib.Path` on the disk of the world that runs now."""

    disk: ClassVar[Disk]

    def exists(self) -> bool:
        try:
            self.disk.find(self)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_dir(self) -> bool:
        return self.exists() and self.disk.find(self).folder

    def is_file(self) -> bool:
        return self.exists() and not self.disk.find(self).folder

    def absolute(self) -> SimPath:
        return self

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        self.disk.change("mkdir")
        if self.exists():
            if not exist_ok:
                raise FileExistsError(errno.EEXIST, "is there", str(self))
            return
        if parents and not self.parent.exists():
            self.parent.mkdir(parents=True, exist_ok=True)
        self.disk.make(self, Node(folder=True))

    def iterdir(self) -> Iterator[SimPath]:
        return iter([self / name for name in sorted(self.disk.find(self).names)])

    def glob(self, pattern: str) -> Iterator[SimPath]:
        """`pattern` has no folder."""
        return (path for path in self.iterdir() if path.match(pattern)) if self.is_dir() else iter(())

    def stat(self) -> Any:
        node = self.disk.find(self)
        return SimpleNamespace(st_size=len(node.data), st_mtime=BEGAN + node.written, st_dev=1, st_ino=id(node))

    def read_bytes(self) -> bytes:
        return bytes(self.disk.find(self).data)

    def write_bytes(self, data: bytes) -> int:
        self.disk.change("create")
        self.disk.make(self, Node(folder=False, data=bytearray(data)))
        return len(data)

    def unlink(self, missing_ok: bool = False) -> None:
        if not self.exists() and missing_ok:
            return
        self.disk.find(self)
        self.disk.change("delete")
        del self.disk.find(self.parent).names[self.name]

    def open(self, mode: str = "r", buffering: int = -1) -> Any:
        if mode == "rb":
            return _Reading(self.disk, self)
        if mode == "ab":
            flags = real_os.O_CREAT
            return _Appending(self.disk, self.disk.os_open(self, flags))
        raise NotImplementedError(mode)


class _Reading(io.BytesIO):
    def __init__(self, disk: Disk, path: SimPath) -> None:
        super().__init__(bytes(disk.find(path).data))
        self._disk, self._descriptor = disk, disk.os_open(path, real_os.O_RDONLY)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        self._disk.close(self._descriptor)
        super().close()


class _Appending:
    def __init__(self, disk: Disk, descriptor: int) -> None:
        self._disk, self._descriptor = disk, descriptor

    def __enter__(self) -> _Appending:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, data: bytes) -> int:
        return self._disk.write(self._descriptor, data)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        self._disk.close(self._descriptor)


class SimOs:
    """The module `os`, for files of the disk and for the end of a process."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.open, self.write, self.fsync, self.close = disk.os_open, disk.write, disk.fsync, disk.close
        self.replace = disk.replace

    def fstat(self, descriptor: int) -> Any:
        node = self._disk.open[descriptor]
        return SimpleNamespace(st_size=len(node.data))

    def ftruncate(self, descriptor: int, length: int) -> None:
        self._disk.change("truncate")
        data = self._disk.open[descriptor].data
        del data[length:]
        data.extend(bytes(length - len(data)))

    def getpid(self) -> int:
        return self._disk.world.process.pid

    def _exit(self, status: int) -> None:
        world = self._disk.world
        world.check()
        world.process.exit(status)
        raise Died

    def __getattr__(self, name: str) -> Any:
        return getattr(real_os, name)


class SimShutil:
    def __init__(self, disk: Disk) -> None:
        self.rmtree = disk.rmtree
