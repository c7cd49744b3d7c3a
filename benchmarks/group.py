"""Contestants as groups of processes that idle until they are told to run, so that passes can be interleaved.

A member is one call of a benchmark script: `python SCRIPT NAME ARGUMENTS`. It prints one line when it is ready (its
address, say); members that are driven then read a number of rounds per line, and print the seconds that each took.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class Member:
    """One process of a contestant."""

    def __init__(self, script: str, *arguments: object, cpu: int | None = None, **environment: str) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
        self.process = subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if cpu is not None:
            os.sched_setaffinity(self.process.pid, {sorted(os.sched_getaffinity(0))[cpu]})

    def tell(self, line: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self.process.args))} ended with {self.process.wait()}")  # type: ignore[arg-type]
        return line

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Group:
    """The processes of one contestant; the `driven` ones take part in every round."""

    def __init__(self, driven: list[Member], others: list[Member]) -> None:
        self._driven, self._others = driven, others

    def run(self, rounds: int) -> list[float]:
        """Seconds of each round, as the first driven member saw them."""
        for member in self._driven:
            member.tell(rounds)
        seconds = [json.loads(member.hear()) for member in self._driven]
        return seconds[0]

    def cpu_seconds(self) -> float:
        """Processor time of all its processes so far."""
        times = [psutil.Process(m.process.pid).cpu_times() for m in self._driven + self._others]
        return sum(t.user + t.system for t in times)

    def end(self) -> None:
        for member in self._driven + self._others:
            member.end()


def rounds_to_run() -> Iterator[int]:
    """In a driven member: the numbers of rounds it is asked for."""
    for line in sys.stdin:
        yield int(line)


def report(value: object) -> None:
    print(json.dumps(value) if isinstance(value, list) else value, flush=True)


def main_of(members: dict[str, Callable[..., None]]) -> None:
    """Runs the member that the command line names; it ends with the process that started it, however that ends."""
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    members[sys.argv[1]](*sys.argv[2:])


def isolate(controls: Sequence[str] = ("cubic", "reno")) -> str:
    """Moves this process (and those it starts) into a network of its own, with the first of the TCP congestion
    controls that the kernel allows there.

    Some control algorithms (bbr) throttle loopback, and a machine's default cannot be changed for one benchmark. To be
    called before anything starts a thread. Returns the algorithm in force: the machine's own where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_net = 0x10000000, 0x40000000
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(new_user | new_net) == 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path("/proc/self", name).write_text(text)
        with socket.socket() as any_socket:  # lo up
            fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))
        for control in controls:
            try:
                CONGESTION.write_text(control)
                break
            except OSError:
                continue
    return CONGESTION.read_text().strip()
