"""Kubernetes as an engine: each process is a pod, made and watched by kubectl. Never run on a cluster so far.

A launcher starts again what ended, so no controller does: pods are bare, and are not restarted in place. One thread
asks for all of them once a second. For a job that is to do without a launcher there are manifests (`job.yaml`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphft.errors import UsageError
from graphft.runtime.engines.base import Engine, EngineError, Order, Process, Run
from graphft.runtime.engines.kubernetes.manifests import USUAL, Pods
from graphft.transpiler import read_record

log = logging.getLogger("graphft")

Object = dict[str, Any]
"""A Kubernetes object, or a part of one."""
LOOK_SECONDS = 1.0
SECONDS = 30.0
"""A call of kubectl may take so long."""
LOST = -signal.SIGKILL
LAUNCHER, SESSION, ORDER = "graphft-launcher", "graphft-session", "graphft-order"
"""Labels of pods: whose they are; of which of its lives; which process."""


def _of_driver(name: str, otherwise: Any) -> Any:
    """A field whose default is what the pod of a script was given (`pod.yaml`)."""
    return field(default_factory=lambda: json.loads(os.environ.get("GRAPHFT_KUBERNETES", "{}")).get(name, otherwise))


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Pods of a cluster. `image`: with graphft; by default $GRAPHFT_IMAGE. The job has a storage, or `volume` holds
    its folder; its etcd is one that the launcher and the pods reach. `name`: of the pods, by default the job's. `env`:
    variables of theirs.

    `kubectl`: the program and its options. Resources are named as in a pod: {"trainer": {"cpu": 2, "memory": 8e9}}.
    """

    image: str = ""
    env_from_secrets: Sequence[str] = _of_driver("env_from_secrets", ())
    tls_secret: str = _of_driver("tls_secret", "")
    pull_secret: str = _of_driver("pull_secret", "")
    volume: tuple[str, str] | None = _of_driver("volume", None)
    kubectl: Sequence[str] = ("kubectl",)
    name: str = _of_driver("name", "")
    env: Mapping[str, str] = _of_driver("env", {})

    def open(self, run: Run) -> Engine:
        image, why, help = self.image or os.environ.get("GRAPHFT_IMAGE", ""), "", ""
        if not image:
            why, help = "pods need an image", "set GRAPHFT_IMAGE, or Kubernetes(image=...)"
        elif shutil.which(self.kubectl[0]) is None:
            why, help = f"there is no {self.kubectl[0]} here", "install kubectl"
        elif "://" not in run.job and self.volume is None:
            why = f"pods cannot reach the job in {run.job}"
            help = 'transpile it with storage="s3://...", or have a volume hold its folder: Kubernetes(volume=...)'
        if why:
            raise UsageError(why, rule="engine", help=help)
        engine = KubernetesEngine(run, dataclasses.replace(self, image=image))
        engine.check()
        return engine


class KubernetesEngine(Engine):
    """Its pods are those of the launcher of this folder on this machine, or of the driver of this name; those of one
    that died before are ended."""

    def __init__(self, run: Run, options: Kubernetes) -> None:
        super().__init__(run)
        self.options = options
        config = read_record(run.job_dir).config
        self.kubectl = Kubectl(options.kubectl)
        machine = f"{socket.gethostname()}:{run.job_dir.resolve()}"
        here = f"{options.name}:{os.path.relpath(run.job_dir)}" if options.name else machine
        self._mine = {LAUNCHER: hashlib.sha256(here.encode()).hexdigest()[:16], SESSION: uuid.uuid4().hex[:8]}
        self._all = Pods(
            name=options.name or config.name,
            image=options.image,
            tls_secret=options.tls_secret,
            env={**run.environment, **options.env},
            env_from_secrets=options.env_from_secrets,
            volume=options.volume,
            pull_secret=options.pull_secret,
            threads=config.threads,
            chunk_timeout=config.chunk_timeout,
        )
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._pods: dict[str, PodProcess] = {}
        """The newest pod of each order."""
        self._thread = threading.Thread(target=self._watch, name="kubectl", daemon=True)

    @property
    def host(self) -> str:
        raise UsageError(
            "pods do not reach an etcd of the launcher's own",
            rule="etcd-endpoints",
            help="give --etcd, or set GRAPHFT_ETCD: one that this machine and the pods reach",
        )

    def check(self) -> None:
        """Raises UsageError if kubectl reaches no cluster now, or may not see pods there."""
        try:
            self.kubectl.pods(f"{LAUNCHER}={self._mine[LAUNCHER]}")
        except EngineError as error:
            raise UsageError(
                f"no pods can be started: {error.message}",
                rule="engine",
                help="see `kubectl config current-context` and `kubectl auth can-i create pods`",
            ) from error

    def prepare(self) -> None:
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()

    def start(self, order: Order) -> Process:
        """Takes as long as kubectl does, about half a second."""
        self.check_open()
        self.prepare()
        if (before := self._pods.get(order.name)) is not None:
            self._keep_log(before)
            self.kubectl.delete(before.name)
        name = f"{self._all.name}-{order.role}-{order.index}-{uuid.uuid4().hex[:5]}"
        self.kubectl.create(self._pod(order, name))
        made = PodProcess(self.kubectl, name, order)
        with self._lock:
            self._pods[order.name] = made
            self._processes = list(self._pods.values())
        return made

    def logs(self, order: Order, lines: int) -> Sequence[str]:
        pod = self._pods.get(order.name)
        try:
            return self.kubectl.logs(pod.name, lines) if pod is not None else []
        except EngineError:
            return []

    def close(self) -> None:
        self._cancelled = True
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        for pod in self._pods.values():
            self._keep_log(pod)
            pod.end(LOST)
        try:
            self.kubectl.delete("--selector", f"{LAUNCHER}={self._mine[LAUNCHER]}")
        except EngineError as error:
            log.warning("pods of this launch may be left: %s", error.message)

    def _pod(self, order: Order, name: str) -> str:
        pods = dataclasses.replace(self._all, endpoints=order.etcd)
        labels = {**self._mine, ORDER: f"{order.role}-{order.index}"}
        wanted = self.run.resources.get(order.role, {})
        amounts = {**USUAL, **{resource: f"{amount:.15g}" for resource, amount in wanted.items()}}
        lines = "\n".join(f'{label}: "{value}"' for label, value in labels.items())
        text = pods.role(order.role, self.run.job, amounts, order.index, pod=name, labels=lines, owner=_owner())
        return f"apiVersion: v1\nkind: Pod\n{text}"

    def _keep_log(self, pod: PodProcess) -> None:
        """Appends its output to the run's log of this role."""
        file = self.run.log(pod.order)
        with contextlib.suppress(EngineError, OSError):
            lines = self.kubectl.logs(pod.name, -1)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as out:
                out.writelines(f"{line}\n" for line in lines)

    def _watch(self) -> None:
        """Looks at the pods, in the engine's own thread."""
        mine = f"{LAUNCHER}={self._mine[LAUNCHER]}"
        told, left = False, True
        while not self._closing.is_set():
            with self._lock:  # before kubectl asks: a pod that is made meanwhile is not missing
                asked = [p for p in self._pods.values() if p.poll() is None]
            try:
                if left:
                    self.kubectl.delete("--selector", f"{mine},{SESSION}!={self._mine[SESSION]}")
                    left = False
                found = {pod["metadata"]["name"]: pod for pod in self.kubectl.pods(mine)}
                for process in asked:
                    process.seen(found.get(process.name))
                told = False
            except EngineError as error:
                if not told:
                    log.warning("the pods are not seen now: %s", error.message)
                told = True
            self._closing.wait(LOOK_SECONDS)


def _owner() -> str:
    """Returns the script's pod, as JSON: the cluster takes its pods away with it."""
    name, uid = os.environ.get("GRAPHFT_POD"), os.environ.get("GRAPHFT_POD_UID")
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}) if name and uid else ""


class PodProcess(Process):
    """A pod's process. Its state is what the engine's thread has seen; its pid is 1, in its container."""

    def __init__(self, kubectl: Kubectl, name: str, order: Order) -> None:
        super().__init__(order)
        self.name, self._kubectl, self.place = name, kubectl, "waiting for the cluster"
        self._killed_by = signal.SIGKILL

    def send_signal(self, signum: int) -> None:
        if self._status is not None:
            return
        try:  # within its container the first process cannot be killed, and not be stopped: SIGKILL deletes the pod
            if signum == signal.SIGKILL or (signum == signal.SIGTERM and not self.pid):
                self._killed_by = signal.Signals(signum)
                self._kubectl.delete(self.name)
            elif signum != signal.SIGCONT:
                self._kubectl.kill(self.name, signum)
        except EngineError as error:
            log.warning("pod %s was not signalled: %s", self.name, error.message)

    def seen(self, pod: Object | None) -> None:
        """Takes in the pod; None: there is none any more."""
        if pod is None:
            self.end(-self._killed_by)
            return
        status = pod.get("status", {})
        ended = exit_status(status)
        if ended is None and status.get("phase") != "Running":
            self.place = f"waiting for {what_for(status)}"
            return
        self.pid, self.place = 1, str(pod["spec"].get("nodeName", ""))
        self._made.set()
        if ended is not None:
            self.end(ended)


def exit_status(status: Object) -> int | None:
    """Returns the exit status of a pod's container, from the pod's status; None while it may run. A pod that failed
    without one was lost."""
    for container in status.get("containerStatuses", []):
        code = container.get("state", {}).get("terminated", {}).get("exitCode")
        if code is not None:
            return int(code) if code <= 128 else 128 - int(code)
    return LOST if status.get("phase") in ("Failed", "Succeeded") else None


def what_for(status: Object) -> str:
    """Says what a pod waits for that does not run."""
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("message"):
            return f"its image: {waiting['message']}"
    unmet = [c for c in status.get("conditions", []) if c["type"] == "PodScheduled" and c["status"] == "False"]
    return f"room: {unmet[0].get('message', '')}" if unmet else "its node to start it"


class Kubectl:
    """Calls kubectl, which knows the way to the cluster and who may do what there. `command`: the program, and what
    stands before its verbs. All methods raise EngineError with what kubectl says."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [*command]

    def create(self, manifest: str) -> None:
        self._run("create", "--filename", "-", given=manifest)

    def pods(self, selector: str) -> list[Object]:
        found = json.loads(self._run("get", "pods", "--selector", selector, "--output", "json"))
        return list(found["items"])

    def kill(self, pod: str, signum: int) -> None:
        """Signals the first process of a pod's container, which is the role's."""
        self._run("exec", pod, "--", "sh", "-c", f"kill -{int(signum)} 1")

    def delete(self, *what: str) -> None:
        """Pods at once, without a grace period: those of these names, or `--selector SELECTOR`."""
        options = ("--ignore-not-found", "--grace-period=0", "--force", "--wait=false")
        self._run("delete", "pods", *what, *options)

    def logs(self, pod: str, lines: int) -> list[str]:
        """The last lines; -1: all of them."""
        return self._run("logs", pod, f"--tail={lines}").splitlines()

    def _run(self, *arguments: str, given: str = "") -> str:
        command, why = [*self._command, *arguments], f"no answer for {SECONDS:.0f} s"
        try:
            done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode == 0:
                return done.stdout
            why = done.stderr.strip()
        except subprocess.TimeoutExpired:
            pass
        except OSError as error:
            why = str(error)
        raise EngineError(
            f"kubectl {arguments[0]}: {why}",
            rule="kubectl",
            help="see whether kubectl reaches the cluster, and may do that",
        )
