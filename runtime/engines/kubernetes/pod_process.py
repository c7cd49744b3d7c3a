"""A process that is a pod's: its state, and its end, as the cluster tells them."""

from __future__ import annotations

import logging
import signal
import subprocess
import threading

from graphft.runtime.engines.base import EngineError, Order
from graphft.runtime.engines.kubernetes.cluster_job import Object
from graphft.runtime.engines.kubernetes.kubectl import Kubectl
from graphft.runtime.process.identity import UNKNOWN, Identity

log = logging.getLogger("graphft")

LOST = -signal.SIGKILL


class PodProcess:
    """A pod's process. Its state is what the engine's thread has seen."""

    identity = UNKNOWN

    def __init__(self, kubectl: Kubectl, name: str, order: Order) -> None:
        self.name, self.order, self._kubectl = name, order, kubectl
        self.place = "waiting for the cluster"
        self.pid = 0
        """1, in its container, once it exists."""
        self.running = False
        self._status: int | None = None
        self._killed_by = signal.SIGKILL
        self._made, self._ended = threading.Event(), threading.Event()

    def await_made(self) -> Identity:
        self._made.wait()
        return self.identity

    def poll(self) -> int | None:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        assert self._status is not None
        return self._status

    def send_signal(self, signum: int) -> None:
        """Within its container the first process cannot be killed, and not be stopped: SIGKILL deletes the pod."""
        if self._status is not None:
            return
        try:
            if signum == signal.SIGKILL or (signum == signal.SIGTERM and not self.running):
                self._killed_by = signal.Signals(signum)
                self._kubectl.delete(self.name)
            elif signum != signal.SIGCONT:
                self._kubectl.kill(self.name, signum)
        except EngineError as error:
            log.warning("pod %s was not signalled: %s", self.name, error.message)

    def seen(self, pod: Object | None) -> None:
        """The engine's thread has looked: this is the pod, or there is none any more."""
        if pod is None:
            self.end(-self._killed_by)
            return
        status = pod.get("status", {})
        ended = exit_status(status)
        if ended is None and status.get("phase") != "Running":
            self.place = f"waiting for {what_for(status)}"
            return
        self.pid, self.running, self.place = 1, True, str(pod["spec"].get("nodeName", ""))
        self._made.set()
        if ended is not None:
            self.end(ended)

    def end(self, status: int) -> None:
        self._status = status if self._status is None else self._status
        self._made.set()
        self._ended.set()


def exit_status(status: Object) -> int | None:
    """Of a pod's container, from the pod's status; None while it may run. A pod that failed without one was lost."""
    for container in status.get("containerStatuses", []):
        code = container.get("state", {}).get("terminated", {}).get("exitCode")
        if code is not None:
            return int(code) if code <= 128 else 128 - int(code)
    return LOST if status.get("phase") in ("Failed", "Succeeded") else None


def what_for(status: Object) -> str:
    """What a pod waits for that does not run."""
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("message"):
            return f"its image: {waiting['message']}"
    unmet = [c for c in status.get("conditions", []) if c["type"] == "PodScheduled" and c["status"] == "False"]
    return f"room: {unmet[0].get('message', '')}" if unmet else "its node to start it"
