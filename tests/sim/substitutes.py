"""Puts the simulated world in the place of the real one: in graphft's modules, for as long as a simulation runs.

The code that is simulated is the code that runs in a job, to the last line; it imports `time`, `threading`, `os` and so
on as any code does. So those names are what is exchanged, in every module of `graphft.runtime`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import os
import pathlib
import pkgutil
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from graphft.runtime import roles
from graphft.runtime.data import reset_signals_in_forks
from graphft.runtime.etcd.lease import Session
from graphft.runtime.etcd.lease_keeper import LeasePage
from graphft.runtime.execute.determinism import settings
from graphft.runtime.execute.lowering import lower
from graphft.runtime.process.identity import UNKNOWN, identify
from graphft.runtime.process.progress import Progress
from graphft.runtime.process.threads import prepare_structs
from graphft.runtime.protocol import task_pass
from graphft.runtime.roles.coordinator import task_store
from graphft.runtime.transport import ZmqClient, ZmqServer
from graphft.runtime.transport.address import advertise_host, network_identity
from tests.sim.disk import Disk, SimOs, SimPath, SimShutil
from tests.sim.network import WorldNetwork
from tests.sim.threads import SimThreading, SimThreadPool, SimTime
from tests.sim.world import World

Pace = Callable[[], float]
_lowered: dict[tuple[Any, ...], Any] = {}


def _lower_once(
    world: World, pace: Pace, block: Any, fetch: Any = (), start: int = 0, observe: Any = None, **options: Any
) -> Any:
    """A block becomes the same function in all processes of a simulation; running it takes time in each."""
    key = (id(block), tuple(fetch), start)
    if observe is not None:
        function = lower(block, fetch=fetch, start=start, observe=observe, **options)
    elif key in _lowered:
        function = _lowered[key][1]
    else:
        function = lower(block, fetch=fetch, start=start, **options)
        _lowered[key] = block, function

    def run(*arguments: Any) -> Any:
        world.effect(f"block {block.name}")
        seconds = pace()
        if seconds:
            world.sleep(seconds)
        return function(*arguments)

    return run


class _Signals:
    """The module `signal`: a process's handlers are its own."""

    def __init__(self, world: World) -> None:
        self._world = world

    def signal(self, number: int, handler: Any) -> Any:
        self._world.process.handlers[number] = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)


class _Ids:
    """The module `uuid`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=self._world.random.getrandbits(128), version=4)


class _Secrets:
    """The module `secrets`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def token_hex(self, count: int) -> str:
        return f"{self._world.random.getrandbits(8 * count):0{2 * count}x}"

    def token_bytes(self, count: int) -> bytes:
        return self._world.random.randbytes(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(secrets, name)


class _LeasePages:
    """`LeasePage`: no other process maps them, and of a process that is killed nobody would close the file."""

    make = staticmethod(LeasePage)


SMALL = ((task_pass, {"GROUP": 2}), (task_store, {"GROUPS": 1}))
"""Sizes: few tasks have several groups, each of which is saved by itself."""


IN_THE_WORLD = (
    "graphft.runtime.",
    "graphft.disk.fileio",
    "graphft.disk.tensor_file",
    "tests.sim.etcd_store",
    "tests.sim.transport",
)
"""Modules, by the beginning of their names, that live in the simulated world; its etcd and network do, too."""


@functools.cache
def _import_all() -> None:
    """Modules that a role would import when it starts, in the middle of a simulation."""
    for module in pkgutil.walk_packages(roles.__path__, f"{roles.__name__}."):
        importlib.import_module(module.name)
    for name in ("graphft.disk.tensor_file", "graphft.transpiler.layout", "graphft.runtime.coordination.run_record"):
        importlib.import_module(name)


@contextlib.contextmanager
def substituted(
    world: World, disk: Disk, network: WorldNetwork, pace: Pace, others: Mapping[Any, Any]
) -> Iterator[None]:
    """Inside, graphft's runtime lives in this world. `pace`: for how many seconds a block computes. `others`: by what
    they replace, further substitutes."""
    _import_all()
    clock = SimTime(world)
    SimPath.disk = disk
    places = {
        id(time): clock,
        id(threading): SimThreading(world),
        id(os): SimOs(disk),
        id(shutil): SimShutil(disk),
        id(signal): _Signals(world),
        id(uuid): _Ids(world),
        id(secrets): _Secrets(world),
        id(socket): SimpleNamespace(gethostname=lambda: "sim"),
        id(pathlib.Path): SimPath,
        id(concurrent.futures.ThreadPoolExecutor): functools.partial(SimThreadPool, world),
        id(Session): functools.partial(Session, clock=clock.monotonic),
        id(Progress): functools.partial(Progress, clock=clock.monotonic),
        id(LeasePage): _LeasePages,
        id(lower): functools.partial(_lower_once, world, pace),
        id(identify): lambda pid=None: UNKNOWN,
        id(network_identity): lambda: "",
        id(advertise_host): lambda *hosts: "127.0.0.1",
        id(ZmqClient): network.make_client,
        id(ZmqServer): network.make_server,
        id(reset_signals_in_forks): lambda: None,
        id(prepare_structs): lambda: None,
        id(settings): lambda device: {},
        **{id(real): substitute for real, substitute in others.items()},
    }
    before = []
    for name, module in list(sys.modules.items()):
        if name.startswith(IN_THE_WORLD):
            for attribute, value in list(vars(module).items()):
                if id(value) in places:
                    before.append((module, attribute, value))
                    setattr(module, attribute, places[id(value)])
    for module, values in SMALL:
        for attribute, value in values.items():
            before.append((module, attribute, getattr(module, attribute)))
            setattr(module, attribute, value)
    try:
        yield
    finally:
        for module, attribute, value in before:
            setattr(module, attribute, value)
