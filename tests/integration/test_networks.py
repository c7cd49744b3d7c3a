"""Processes of one job in two networks, as on two hosts: etcd is what both can reach."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphft.runtime.etcd.embedded import find_etcd
from tests.integration import training
from tests.integration.plays import Program

pytestmark = pytest.mark.timeout(600)
HERE, THERE = "10.213.77.1", "10.213.77.2"
ENTER = "import os, sys; os.execvp('nsenter', ['nsenter', '--net=/run/netns/' + sys.argv[1], *sys.argv[2:]])"


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=20)


@pytest.fixture
def networks() -> Iterator[tuple[str, str]]:
    """Two network namespaces with one wire between them, and no default route."""
    one, other = (f"gft{uuid.uuid4().hex[:8]}" for _ in range(2))
    try:
        for name in (one, other):
            ip(f"netns add {name}")
        ip(f"-n {one} link add wire type veth peer name wire netns {other}")
        for name, address in ((one, HERE), (other, THERE)):
            ip(f"-n {name} address add {address}/24 dev wire")
            for device in ("lo", "wire"):
                ip(f"-n {name} link set {device} up")
        yield one, other
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    finally:
        for name in (one, other):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


class Host:
    """What is started in one network. All of it is ended with the test."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.started = name, folder, list[Program]()

    def run(self, *command: str | Path) -> Program:
        self.started.append(Program(self.folder, "-c", ENTER, self.name, *command))
        return self.started[-1]

    def role(self, role: str, job: Path, etcd: str) -> Program:
        return self.run(sys.executable, "-m", "graphft", "start", role, "--job", job, "--etcd", f"{etcd}:2379")


@pytest.mark.slow
def test_two_hosts_meet_where_etcd_is(folder: Path, networks: tuple[str, str]) -> None:
    """A pserver listens where the way to etcd begins; one on loopback is no good to another host."""
    training.job(training.program(plain=True), trainers=1, pservers=1, epochs=1, lease_ttl=10).save(folder / "job")
    one, other = (Host(name, folder) for name in networks)
    try:
        one.run(
            find_etcd(),
            "--data-dir",
            folder / "etcd",
            "--listen-client-urls",
            "http://0.0.0.0:2379",
            "--advertise-client-urls",
            f"http://{HERE}:2379",
        )
        local = one.role("pserver", folder / "job", "127.0.0.1")
        local.says(": others reach this process at tcp://127.0.0.1:")
        refused = other.role("trainer", folder / "job", HERE)
        assert refused.wait() == 2
        assert "error[out-of-reach]: pserver 0 listens at tcp://127.0.0.1:" in refused.output
        assert "set GRAPHFT_HOST where pservers run" in refused.output
        local.process.terminate()  # its lease ends with it
        local.wait()
        pserver = one.role("pserver", folder / "job", HERE)
        trainer = other.role("trainer", folder / "job", HERE)
        assert (trainer.wait(), pserver.wait()) == (0, 0), trainer.output + pserver.output
        assert "claimed slot 0" in trainer.output
    finally:
        for program in (*one.started, *other.started):
            program.kill()
