"""A stand-in for kubectl: the verbs that graphft calls, on a `Cluster` of local processes. It is no cluster.

Run as a program it passes its arguments and its input to the test's process, and prints what that answers.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.cluster import Cluster


class Refused(Exception):
    """What kubectl would say on stderr."""


class KubectlStandIn:
    """Answers `command`, as long as the `with` lasts. `fail`: what it says instead, of every call, if it is set."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.fail = cluster, ""
        self.calls: list[list[str]] = []
        self._address = f"\0graphft-kubectl-{os.getpid()}-{id(self):x}"
        self.command = (sys.executable, "-I", "-S", str(Path(__file__)), self._address[1:])
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="kubectl stand-in", daemon=True)

    def __enter__(self) -> KubectlStandIn:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rw") as stream:
                request = json.loads(stream.readline())
                stream.write(json.dumps(self._answer(request["arguments"], request["given"])))

    def _answer(self, arguments: list[str], given: str) -> dict[str, Any]:
        self.calls.append(arguments)
        try:
            if self.fail:
                raise Refused(self.fail)
            return {"status": 0, "out": _VERBS[arguments[0]](self, arguments[1:], given), "err": ""}
        except Refused as refused:
            return {"status": 1, "out": "", "err": f"{refused}\n"}

    def _create(self, arguments: Sequence[str], given: str) -> str:
        import yaml

        item = yaml.safe_load(given)
        self.cluster.apply([item])
        return f"pod/{item['metadata']['name']} created\n"

    def _get(self, arguments: Sequence[str], given: str) -> str:
        found = [self.cluster.pods.get(name) for name in self._named(arguments[1:])]
        items = [
            {"metadata": {"name": pod.name, "labels": pod.labels}, "spec": {"nodeName": "node"}, "status": pod.status}
            for pod in found
            if pod is not None  # removed meanwhile
        ]
        return json.dumps({"items": items})

    def _exec(self, arguments: Sequence[str], given: str) -> str:
        pod, number = self.cluster.pods.get(arguments[0]), re.fullmatch(r"kill -(\d+) 1", arguments[-1])
        if pod is None or pod.process is None:
            raise Refused(f'pods "{arguments[0]}" not found')
        assert number is not None
        pod.signal(signal.Signals(int(number[1])))
        return ""

    def _delete(self, arguments: Sequence[str], given: str) -> str:
        assert {"--ignore-not-found", "--grace-period=0", "--force", "--wait=false"} <= set(arguments)
        names = self._named([a for a in arguments[1:] if not a.startswith("--") or a == "--selector"])
        self.cluster.remove(names)
        return ""

    def _logs(self, arguments: Sequence[str], given: str) -> str:
        if arguments[0] not in self.cluster.pods:
            raise Refused(f'pods "{arguments[0]}" not found')
        log = self.cluster.pods[arguments[0]].log
        if not log.exists():
            raise Refused(f'container in pod "{arguments[0]}" is waiting to start')
        lines = log.read_text().splitlines()
        count = int(arguments[1].partition("=")[2])
        return "\n".join(lines if count < 0 else lines[-count:])

    def _named(self, arguments: Sequence[str]) -> list[str]:
        if arguments[0] != "--selector":
            return [name for name in arguments if name in self.cluster.pods]
        terms = [re.fullmatch(r"([\w-]+)(!?=)([\w-]+)", term) for term in arguments[1].split(",")]
        found = []
        for pod in list(self.cluster.pods.values()):
            held = [(pod.labels.get(term[1]) == term[3]) == (term[2] == "=") for term in terms if term is not None]
            if all(held) and len(held) == len(terms):
                found.append(pod.name)
        return found


_VERBS: Mapping[str, Callable[[KubectlStandIn, Sequence[str], str], str]] = {
    "create": KubectlStandIn._create,
    "get": KubectlStandIn._get,
    "exec": KubectlStandIn._exec,
    "delete": KubectlStandIn._delete,
    "logs": KubectlStandIn._logs,
}


def main(address: str, arguments: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{address}")
        with connection.makefile("rw") as stream:
            given = sys.stdin.read() if "-" in arguments else ""
            stream.write(json.dumps({"arguments": arguments, "given": given}) + "\n")
            stream.flush()
            answer = json.loads(stream.read())
    sys.stdout.write(answer["out"])
    sys.stderr.write(answer["err"])
    return int(answer["status"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
