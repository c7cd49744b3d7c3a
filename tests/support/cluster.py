"""The controllers that make pods of manifests, the pods being local processes (`pods.py`). It is no cluster.

    with Cluster(folder) as cluster:
        cluster.apply(manifests)
        cluster.until(lambda: cluster.job("cancer-trainer").complete)

StatefulSets and Jobs make and replace pods as their specifications ask; a Service with an address of its own is a proxy
to its pods that are ready. There are no nodes and no scheduler: all pods have room. A pod of a StatefulSet keeps its
address, since its name stands for it.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.pods import BACK_OFF, LONGEST_BACK_OFF, Object, Pod
from tests.support.proxy import Proxy

STEP_SECONDS = 0.02
INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass
class JobState:
    """The status of a Job."""

    spec: Object
    succeeded: set[int] = field(default_factory=set)
    ignored: int = 0
    failures: int = 0
    failed: str = ""
    """The reason, if it is."""
    next_at: dict[int, float] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.succeeded) == self.spec["completions"]

    def take(self, index: int, pod: Pod) -> None:
        """A pod has ended."""
        assert pod.finished is not None
        action = self._action(pod.finished)
        if pod.finished == 0:
            self.succeeded.add(index)
        elif action == "FailJob":
            self.failed = f"pod {pod.name} ended with {pod.finished}"
        elif action == "Ignore":
            self.ignored += 1
        else:
            self.failures += 1
            self.next_at[index] = time.monotonic() + min(LONGEST_BACK_OFF, BACK_OFF * 2 ** (self.failures - 1))
            if self.failures > self.spec["backoffLimit"]:
                self.failed = f"{self.failures} failures"

    def _action(self, status: int) -> str:
        for rule in self.spec.get("podFailurePolicy", {}).get("rules", []):
            if status in rule.get("onExitCodes", {}).get("values", ()):
                return str(rule["action"])
        return "Count"


class Cluster:
    """Its pods live below `folder`, in a thread of its own. `with` ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[tuple[str, str], Object] = {}
        self.pods: dict[str, Pod] = {}
        self._jobs: dict[str, JobState] = {}
        self._addresses: dict[str, str] = {}
        self._network, self._claim = _free_network()
        self._numbers = itertools.count(1)
        self._services = contextlib.ExitStack()
        self._lock, self._closing = threading.RLock(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="cluster")

    def __enter__(self) -> Cluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        self._thread.join()
        self._services.close()
        self._claim.close()

    # -- what a user does ---------------------------------------------------------------------------------------

    def apply(self, manifests: Sequence[Object]) -> None:
        with self._lock:
            for item in manifests:
                key = (item["kind"], item["metadata"]["name"])
                if item["kind"] == "Service" and key not in self.objects and "clusterIP" not in item["spec"]:
                    self._serve(item)
                if item["kind"] == "Job":
                    self._jobs[key[1]] = JobState(item["spec"])
                self.objects[key] = item

    def delete_pod(self, name: str) -> None:
        with self._lock:
            self.pods[name].delete()

    def job(self, name: str) -> JobState:
        return self._jobs[name]

    def running(self, component: str) -> list[Pod]:
        with self._lock:
            found = [p for p in self.pods.values() if p.labels["app.kubernetes.io/component"] == component]
            return [p for p in found if p.process is not None and not p.leaving]

    def ready(self, component: str) -> int:
        return sum(pod.ready for pod in self.running(component))

    def until(self, condition: Callable[[], object], seconds: float = 300.0) -> None:
        """Waits; an AssertionError tells what the pods say."""
        end = time.monotonic() + seconds
        while not condition():
            if self._error is not None:
                raise self._error
            assert time.monotonic() < end, f"waited {seconds:.0f} s in vain; the pods say:\n{self.logs()}"
            time.sleep(0.05)

    def logs(self, lines: int = 15) -> str:
        files = sorted(self.folder.glob("*.log"))
        return "\n".join("\n".join([f"== {f.stem}", *f.read_text().splitlines()[-lines:]]) for f in files)

    def address(self, name: str) -> str:
        """Returns that of a Service, or of a pod with a name of its own (POD.SERVICE)."""
        with self._lock:
            pod = name.partition(".")[0]
            if pod not in self._addresses:
                number = next(self._numbers)
                self._addresses[pod] = self.numbered(number)
            return self._addresses[pod]

    def numbered(self, number: int) -> str:
        return f"127.{self._network}.{number >> 8}.{number & 255}"

    def _resolve(self, host: str) -> str:
        """A name that the cluster does not know is somebody else's."""
        known = ("Service", host.rpartition(".")[2]) in self.objects
        return self.address(host) if known else host

    # -- the control plane --------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Pods are this thread's children, and die with it."""
        try:
            while not self._closing.wait(STEP_SECONDS):
                with self._lock:
                    for (kind, name), item in list(self.objects.items()):
                        control = _CONTROLLERS.get(kind)
                        if control is not None:
                            control(self, name, item["spec"])
                    for pod in self.pods.values():
                        pod.step()
        except BaseException as error:
            self._error = error
        finally:
            for pod in self.pods.values():
                pod.end()

    def _make(self, name: str, template: Object, fields: Mapping[str, str], stable: bool = False) -> None:
        number = next(self._numbers)
        address = self.address(name) if stable else self.numbered(number)
        claims = {"data": self.folder / "claims" / name} if stable else {}
        folder = self.folder / f"{name}-{number}"
        self.pods[name] = Pod(name, template, fields, folder, address, self._resolve, claims)

    def _bury(self, name: str) -> Pod | None:
        """The pod of this name, if it has ended: it is taken away."""
        pod = self.pods.get(name)
        if pod is None or pod.finished is None:
            return None
        return self.pods.pop(name)

    def _stateful_set(self, name: str, spec: Object) -> None:
        assert spec["podManagementPolicy"] == "Parallel"
        for ordinal in range(spec["replicas"]):
            pod = f"{name}-{ordinal}"
            self._bury(pod)
            if pod not in self.pods:
                fields = {"metadata.labels['apps.kubernetes.io/pod-index']": str(ordinal)}
                self._make(pod, spec["template"], fields, stable=True)

    def _job(self, name: str, spec: Object) -> None:
        state = self._jobs[name]
        for index in range(spec["completions"]):
            pod = f"{name}-{index}"
            if index not in state.succeeded and (ended := self._bury(pod)) is not None:
                state.take(index, ended)
            if state.failed:
                with contextlib.suppress(KeyError):
                    self.pods[pod].delete()
            elif not (index in state.succeeded or pod in self.pods or time.monotonic() < state.next_at.get(index, 0)):
                self._make(pod, spec["template"], {f"metadata.annotations['{INDEX}']": str(index)})

    def _serve(self, service: Object) -> None:
        spec = service["spec"]

        def targets(port: Mapping[str, Any]) -> list[tuple[str, int]]:
            with self._lock:
                pods = [p for p in self.pods.values() if spec["selector"].items() <= p.labels.items() and p.ready]
                named = {p.name: {n["name"]: n["containerPort"] for n in p.container["ports"]} for p in pods}
            return [(p.address, named[p.name][port["targetPort"]]) for p in pods]

        for port in spec["ports"]:
            here = (self.address(service["metadata"]["name"]), port["port"])
            self._services.enter_context(Proxy(lambda port=port: targets(port), here))


def _free_network() -> tuple[int, socket.socket]:
    """A number n so that nobody else takes 127.n.*.* as long as the socket is open: tests run side by side."""
    for number in range(64, 255):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0graphft-cluster-{number}")
        except OSError:
            claim.close()
        else:
            return number, claim
    raise RuntimeError("no network is free: too many clusters")


_CONTROLLERS: dict[str, Callable[[Cluster, str, Object], None]] = {
    "StatefulSet": Cluster._stateful_set,
    "Job": Cluster._job,
}
