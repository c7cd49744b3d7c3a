"""The engine of machines that ssh reaches: on a real sshd of this machine where there is one, and on a stand-in."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from graphft.errors import UsageError
from graphft.runtime.engines import ssh as ssh_module
from graphft.runtime.engines.base import EngineError, Order, Run
from graphft.runtime.engines.ssh import Ssh, SshEngine, SshStep
from graphft.runtime.etcd.embedded import free_ports
from graphft.runtime.launcher.supervisor import Supervisor
from tests.engines.conformance import SILENT, check, started
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, assert_same_bits, at, play
from tests.support.ssh import NAMES, Sshd, StandIn, why_not
from tests.support.waiting import ended, until

pytestmark = pytest.mark.timeout(600)
PATIENCE = 120.0
TRAINER = Order("trainer", 0, SILENT)


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path / "machines")


@pytest.fixture(params=["stand-in", "sshd"])
def ways(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StandIn | Sshd]:
    """To the machines."""
    if request.param == "stand-in":
        yield StandIn(tmp_path / "machines")
        return
    if why_not():
        pytest.skip(f"no real sshd: {why_not()}")
    with Sshd(tmp_path / "sshd", free_ports(1)[0]) as made:
        yield made


@pytest.fixture
def opened(job_dir: Path, stand_in: StandIn) -> Iterator[Callable[..., SshEngine]]:
    engines = []

    def open_engine(*hosts: str, environment: dict[str, str] | None = None, **options: Any) -> SshEngine:
        options = {"hosts": hosts, "ssh": stand_in.command, **options}
        engines.append(Ssh(**options).open(Run(job_dir, str(job_dir), environment or {})))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def test_what_holds_for_every_engine(job_dir: Path, ways: StandIn | Sshd) -> None:
    engine = Ssh(NAMES, ssh=ways.command).open(Run(job_dir, str(job_dir), {"OMP_NUM_THREADS": "1"}))
    try:
        check(engine)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_job(ways: StandIn | Sshd, undisturbed: Played, tmp_path: Path, pace: Pace) -> None:
    """A pserver is killed; the connections to a trainer and to a pserver are cut, and what was there ends. The machine
    of the latter is lost, if it is a stand-in."""
    pace.set(0.4)
    cut: list[SshStep] = []

    def cut_off(role: str, index: int) -> Callable[[Supervisor], None]:
        def do(supervisor: Supervisor) -> None:
            step = supervisor.children[role, index].process
            assert isinstance(step, SshStep)
            cut.append(step)
            if role == "pserver" and isinstance(ways, StandIn):
                ways.refuse(step.host)
            step._signal_program(signal.SIGKILL)

        return do

    def end(supervisor: Supervisor) -> None:
        pace.set(0.0)
        last = supervisor.children["pserver", 1].process
        assert isinstance(last, SshStep)
        assert not isinstance(ways, StandIn) or last.host != cut[-1].host

    def kill_pserver(supervisor: Supervisor) -> None:
        assert {child.process.place for child in supervisor.children.values() if child.process} == set(NAMES)
        assert supervisor.signal("pserver", 0, signal.SIGKILL)

    acts = [
        Act(at(5), kill_pserver),
        Act(at(11), cut_off("trainer", 1)),
        Act(at(17), cut_off("pserver", 1)),
        Act(at(23), end),
    ]
    job = training.job(training.program(), pace=pace.file, lease_ttl=20)
    played = play(job, tmp_path / "job", acts, engine=Ssh(NAMES, ssh=ways.command))
    assert_same_bits(played.state, undisturbed.state)
    for step in cut:
        until(lambda step=step: step.identity.dead, PATIENCE)  # type: ignore[misc]
        assert step.lost
        assert step.poll() == -signal.SIGKILL
    assert sum(played.result.preemptions.values()) >= 3
    assert not played.result.failures


def test_a_machine_that_refuses_is_left_to_others_for_a_while(
    opened: Callable[..., SshEngine], stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "graphft")
    stand_in.refuse("a", "No route to host")
    engine = opened("a", "b")
    refused = started(engine, TRAINER)
    refused.wait(PATIENCE)
    assert (refused.host, refused.pid) == ("a", 0)
    assert started(engine, TRAINER).host == "b"
    assert [line for line in caplog.messages if line.startswith("a takes no process (ssh: connect")]
    stand_in.accept("a")
    engine._refused["a"] = ("", 0.0)  # the while is over
    again = started(engine, TRAINER)
    until(lambda: again.pid, PATIENCE)
    assert again.host == "a"
    engine.step()
    assert "a takes processes again" in caplog.messages


def _refused(engine: SshEngine) -> None:
    with contextlib.suppress(EngineError):
        engine.start(Order("trainer", 1, SILENT)).wait(PATIENCE)


def test_no_machine_ever_takes_a_process(opened: Callable[..., SshEngine], stand_in: StandIn) -> None:
    stand_in.refuse("a", "Permission denied")
    engine = opened("a", "b", python="/no/such/python")

    def fails() -> str:
        _refused(engine)
        try:
            engine.step()
        except UsageError as error:
            return str(error)
        return ""

    told: list[str] = []
    until(lambda: told.append(fails()) or told[-1], PATIENCE)
    assert "a: ssh: connect to host a: Permission denied; b: " in told[-1]
    assert "/no/such/python: not found" in told[-1]
    assert "`ssh HOST /no/such/python -m graphft --help`" in told[-1]


def test_one_that_does_not_begin_is_given_up(
    opened: Callable[..., SshEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_module, "BEGIN_SECONDS", 0.5)
    engine = opened("a", ssh=("sh", "-c", "exec sleep 1000"))
    step = engine.start(TRAINER)

    def over() -> bool:
        with contextlib.suppress(UsageError):  # it is the only machine
            engine.step()
        return step.poll() is not None

    until(over, PATIENCE)
    assert step.refused.startswith("it has not begun within")


def test_nothing_outlives_a_killed_launcher(job_dir: Path, ways: StandIn | Sshd) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from graphft.runtime.engines.base import Order, Run\n"
        "from graphft.runtime.engines.ssh import Ssh\n"
        f"engine = Ssh('a', ssh={ways.command!r}).open(Run(Path({str(job_dir)!r}), {str(job_dir)!r}))\n"
        f"step = engine.start(Order('trainer', 0, {SILENT!r}))\n"
        "print(step.await_made().pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        role = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
    until(lambda: ended(role), PATIENCE)


def test_what_a_role_is_told(opened: Callable[..., SshEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its environment reaches it as it is, and stands in no command line."""
    odd = 'it\'s "$(odd)"\n`and` \\ long' + "x" * 100_000
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    monkeypatch.setenv("GRAPHFT_ETCD_PASSWORD", "passw0rd")
    monkeypatch.setenv("UNASKED", "1")
    monkeypatch.chdir(tmp_path)
    step = opened("a", environment={"ODD": odd}).start(TRAINER)
    step.await_made()
    role = psutil.Process(step.pid)
    until(lambda: "ODD" in role.environ())  # it was just forked
    environment = role.environ()
    assert environment["ODD"] == odd
    assert environment["AWS_SECRET_ACCESS_KEY"] == "s3cr3t"
    assert environment["GRAPHFT_ETCD_PASSWORD"] == "passw0rd"
    assert "UNASKED" not in environment
    assert role.cwd() == str(tmp_path)
    program = step._program
    assert program is not None
    lines = [p.cmdline() for p in [role, *role.parents(), psutil.Process(program.pid)]]
    assert "trainer" in lines[0]
    assert not any(word in str(lines) for word in ("s3cr3t", "passw0rd", "odd"))


def test_a_role_ends_with_its_stdin(tmp_path: Path) -> None:
    """So does what it has started. Signals reach it until then. A shell script stands for the role."""
    asked, child, role = tmp_path / "asked", tmp_path / "child", tmp_path / "role"
    script = f"trap 'touch {asked}' TERM; sleep 1000 & echo $! > {child}; while :; do sleep 0.1; done"
    role.write_text(f"#!/bin/sh\n{script}\n")
    role.chmod(0o755)
    code = (
        f"import sys; sys.executable = {str(role)!r}; from graphft.runtime.engines.remote_task import main; "
        "sys.exit(main(['--tied', 'trainer']))"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as begun:
        assert begun.stdin is not None
        assert begun.stdout is not None
        pid = msgspec.json.decode(begun.stdout.readline())["pid"]
        until(lambda: child.exists() and child.read_text().endswith("\n"), PATIENCE)
        begun.stdin.write(b"15\n")
        begun.stdin.flush()
        until(asked.exists, PATIENCE)
        assert psutil.pid_exists(pid)
        begun.stdin.close()
        assert begun.wait(PATIENCE) == 128 + signal.SIGKILL
        assert begun.stdout.readline() == b'{"status":-9}\n'
    until(lambda: ended(int(child.read_text())), PATIENCE)


def test_this_machine_must_be_reached(opened: Callable[..., SshEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines must reach the launcher's etcd."""
    monkeypatch.delenv("GRAPHFT_HOST", raising=False)
    assert opened("a", "localhost").host == "127.0.0.1"  # both are here
    engine = opened("no-such-machine.invalid", ssh=("false",))
    with pytest.raises(UsageError, match=r"no address towards no-such-machine\.invalid"):
        _ = engine.host
    monkeypatch.setenv("GRAPHFT_HOST", "10.1.2.3")
    assert engine.host == "10.1.2.3"
