"""Machines that ssh reaches: a stand-in for ssh that runs commands here, and a real sshd of a test's own.

Run as a program it is the stand-in: `python ssh.py FOLDER [OPTION ...] HOST COMMAND`. A file FOLDER/HOST says why the
machine refuses.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

MARK = "GRAPHFT_TEST_SESSION"
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
NAMES = ("a", "b", "c")
_CONF = """ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
MaxStartups 100
SetEnv {mark}={session}
"""
_CLIENT = """Host {names}
    HostName 127.0.0.1
    Port {port}
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
"""


def why_not() -> str:
    """The reason why there can be no sshd here; "" if there can."""
    for name in ("sshd", "ssh", "ssh-keygen"):
        if shutil.which(name, path=PATH) is None:
            return f"there is no {name}: apt-get install openssh-server"
    if os.geteuid() == 0:
        try:
            pwd.getpwnam("sshd")
        except KeyError:
            return "there is no user sshd, which root's sshd needs: apt-get install openssh-server"
        if not Path("/run/sshd").is_dir():
            return "there is no /run/sshd, which root's sshd needs: mkdir /run/sshd"
    return ""


class StandIn:
    """`command`: instead of ssh."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.command = (sys.executable, "-I", "-S", __file__, str(folder))

    def refuse(self, host: str, why: str = "Connection refused") -> None:
        from tests.support.files import put  # here: as a program, this file has the standard library alone

        put(self.folder / host, why)

    def accept(self, host: str) -> None:
        (self.folder / host).unlink()


class Sshd:
    """An sshd on a port of loopback, for this user, with keys of its own. To be used in a `with`."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.command = ("ssh", "-F", str(folder / "config"))
        folder.mkdir()
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host_key.pub').read_text()}")
        conf = _CONF.format(port=port, folder=folder, mark=MARK, session=os.environ.get(MARK, ""))
        (folder / "sshd_config").write_text(conf)
        (folder / "config").write_text(_CLIENT.format(names=" ".join(NAMES), port=port, folder=folder))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sshd:
        program = str(shutil.which("sshd", path=PATH))
        with (self.folder / "log").open("wb") as log:
            command = [program, "-D", "-e", "-f", str(self.folder / "sshd_config")]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        from tests.support.waiting import until  # not for the program below, which has no such path

        try:
            until(self._listens)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 5.0).close()
            return True
        return False

    def __exit__(self, *exc: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait()


def main(folder: str, *arguments: str) -> int:
    if arguments[-2] == "-G":
        print("hostname 127.0.0.1")
        return 0
    host, command = arguments[-2:]
    with contextlib.suppress(FileNotFoundError):
        why = (Path(folder) / host).read_text()
        print(f"ssh: connect to host {host}: {why}", file=sys.stderr)
        return 255
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", MARK) if name in os.environ}
    print("a login shell may say something", flush=True)
    there = subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept, cwd="/", start_new_session=True
    )
    assert there.stdin is not None
    assert there.stdout is not None
    threading.Thread(target=_relay, args=(0, there.stdin), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(255))  # and the command's stdin ends
    _relay(there.stdout.fileno(), sys.stdout.buffer)
    status = there.wait()
    return status if status >= 0 else 255


def _relay(source: int, target: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError), target:
        while data := os.read(source, 1 << 16):
            target.write(data)
            target.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
