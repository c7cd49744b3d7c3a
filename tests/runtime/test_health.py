"""What a role answers to a scheduler's probes, and how it ends under one."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from graphft.errors import UsageError
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.roles import health as attendance_module
from graphft.runtime.roles.environment import RoleSpec, make_role
from graphft.runtime.roles.health import Attendance, Health, serve_health
from graphft.transpiler import Job
from tests.runtime.trainers import stage
from tests.support.waiting import until

LIVE, READY = "/healthz", "/readyz"


def ask(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=120)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_over_http() -> None:
    health = Health()
    port = serve_health(health, "127.0.0.1:0")
    assert ask(port, LIVE) == (200, "starting\n")
    assert ask(port, READY) == (503, "starting\n")
    assert ask(port, "/") == (404, "there is no /, but /healthz and /readyz\n")
    health.over = True
    assert ask(port, LIVE) == ask(port, READY) == (200, "the job is over\n")


def test_ipv6_as_a_pod_knows_its_address() -> None:
    assert ask(serve_health(Health(), "::1:0"), LIVE, "::1")[0] == 200
    assert ask(serve_health(Health(), "[::1]:0"), LIVE, "::1")[0] == 200


@pytest.mark.parametrize("address", ["8080", ":8080", "host:65536", "192.0.2.1:1"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(UsageError) as caught:
        serve_health(Health(), address)
    assert caught.value.rule == "health"


def test_of_a_trainer(etcd_server: EmbeddedEtcd, keys: Keys, job: Job, tmp_path: Path) -> None:
    with stage(etcd_server, keys, job, tmp_path) as scene:
        health, trainer = Health(), scene.trainer(0)
        health.process = trainer
        assert health.answer(READY)[0] == health.answer(LIVE)[0] == 200
        progress = trainer.member.progress
        progress.begin("computing")
        assert health.answer(LIVE) == (200, "trainer 0: computing")
        progress.last = time.monotonic() - progress.limit - 7
        status, why = health.answer(LIVE)
        assert status == health.answer(READY)[0] == 503
        assert re.fullmatch(r"no progress for \d+ s while computing, limit 54 s", why)
        progress.beat()
        assert health.answer(LIVE)[0] == 200
        trainer.member.session.page.ended = 1  # as its keeper notes
        assert health.answer(LIVE) == (503, "the lease is lost")
        trainer.end.closing.set()
        assert health.answer(LIVE)[0] == 200, "a process that ends is not to be killed for that"
        assert health.answer(READY) == (503, "ending")


def test_a_pserver_is_ready_when_it_serves(etcd_server: EmbeddedEtcd, keys: Keys, job: Job, tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with stage(etcd_server, keys, job, tmp_path) as scene:
            role = make_role(scene.job, tmp_path, RoleSpec("pserver", 0), scene.etcd)
            assert role is not None
            health = Health()
            health.process = role
            assert health.answer(READY) == (503, "it is not registered")
            role.blocks.run("init")
            assert health.answer(READY) == (503, "its shard has no state so far")
            serving = threading.Thread(target=role.blocks.run, args=("serve",))
            serving.start()
            until(lambda: health.answer(READY) == (200, "pserver 0 at step 0: serving"))
            role.server.leaving = True  # type: ignore[attr-defined]
            serving.join()
            role.server.saver.close()  # type: ignore[attr-defined]
            role.server.close()  # type: ignore[attr-defined]
            role.close()
            role.transport.close()  # type: ignore[attr-defined]
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_statuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is for a job that is complete, where the scheduler takes it so."""
    attendance = Attendance("", False, 143)
    assert [attendance.end(status, tmp_path) for status in (0, 1, 75)] == [143, 1, 75]
    monkeypatch.setattr(attendance_module, "is_complete", lambda folder: folder == tmp_path)
    assert [attendance.end(status, tmp_path) for status in (0, 1, 75)] == [0, 1, 75]
    assert attendance.health.over


def test_stays_until_it_is_asked_to_go(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    code = (
        "import sys; from pathlib import Path; from graphft.runtime.roles import health as module;"
        "serve = module.serve_health; module.serve_health = lambda *a: print(serve(*a), flush=True);"
        "a = module.Attendance('127.0.0.1:0', True, 143); sys.exit(a.end(0, Path(sys.argv[1])))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        until(lambda: ask(port, READY) == (200, "the job is over\n"))
        assert process.poll() is None
        process.terminate()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root")
def test_the_first_process_of_a_container_ends_by_sigterm(tmp_path: Path) -> None:
    """The kernel delivers no signal to it that it does not handle: a pod would wait out its grace period."""
    code = (
        "import os, time; from graphft.runtime.roles.health import Attendance;"
        "Attendance('', False, 0); print(os.getpid(), flush=True); time.sleep(600)"
    )
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare --pid is not allowed here")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGTERM)
            assert process.wait(120) == 143
        finally:
            process.kill()
