"""Kubernetes as an engine: each process is a pod, made and watched by kubectl. Never run on a cluster so far.

A launcher starts again what ended, so no controller does: pods are bare, and are not restarted in place. One thread
asks for all of them once a second. For a job that is to do without a launcher there are manifests (`manifests.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphft.errors import UsageError
from graphft.runtime.engines.base import Engine, EngineError, Listed, Order, Process, Run
from graphft.runtime.engines.kubernetes.cluster_job import ClusterJob, Object, Resources, check_name, object_name
from graphft.runtime.engines.kubernetes.kubectl import Kubectl
from graphft.runtime.engines.kubernetes.pod_process import LOST, PodProcess
from graphft.runtime.engines.kubernetes.pods import role_pod
from graphft.transpiler import read_record

log = logging.getLogger("graphft")

LOOK_SECONDS = 1.0
LAUNCHER, SESSION, ORDER = "graphft-launcher", "graphft-session", "graphft-order"
"""Labels of pods: whose they are; of which of its lives; which process."""
USUAL = {"cpu": "1", "memory": "4Gi"}


def _of_driver(name: str, otherwise: Any) -> Any:
    """A field's default is a function."""

    def given() -> Any:
        text = os.environ.get("GRAPHFT_KUBERNETES", "{}")
        try:
            return json.loads(text).get(name, otherwise)
        except (ValueError, AttributeError):
            raise UsageError(
                f"GRAPHFT_KUBERNETES is {text!r}, expected a JSON object",
                rule="environment",
                help="unset it: the manifests of `graphft kubernetes SCRIPT.py` set it in a driver's pod",
            ) from None

    return field(default_factory=given)


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Pods of a cluster. `image`: with graphft; by default $GRAPHFT_IMAGE. The job has a storage, or `volume` holds
    its folder; its etcd is one that the launcher and the pods reach. `name`: of the pods, by default the job's. `env`:
    variables of theirs.

    `kubectl`: the program and its options. Resources are named as in a pod: {"trainer": {"cpu": 2, "memory": 8e9}}.
    The defaults are those of $GRAPHFT_KUBERNETES (JSON), by which a driver's pod knows its own (`driver.py`).
    """

    image: str = ""
    namespace: str = _of_driver("namespace", "")
    env_from_secrets: Sequence[str] = _of_driver("env_from_secrets", ())
    tls_secret: str = _of_driver("tls_secret", "")
    pull_secret: str = _of_driver("pull_secret", "")
    volume: tuple[str, str] | None = _of_driver("volume", None)
    kubectl: Sequence[str] = ("kubectl",)
    name: str = _of_driver("name", "")
    env: Mapping[str, str] = _of_driver("env", {})

    def open(self, run: Run) -> Engine:
        image = self.image or os.environ.get("GRAPHFT_IMAGE", "")
        if not image:
            raise UsageError("pods need an image", rule="engine", help="set GRAPHFT_IMAGE, or Kubernetes(image=...)")
        if self.name:
            check_name(self.name, "Kubernetes(name=...)")
        if shutil.which(self.kubectl[0]) is None:
            raise UsageError(f"there is no {self.kubectl[0]} here", rule="engine", help="install kubectl")
        if "://" not in run.job and self.volume is None:
            raise UsageError(
                f"pods cannot reach the job in {run.job}",
                rule="engine",
                help='transpile it with storage="s3://...", or have a volume hold its folder: Kubernetes(volume=...)',
            )
        engine = KubernetesEngine(run, dataclasses.replace(self, image=image))
        engine.check()
        return engine


class KubernetesEngine(Engine):
    """Its pods are those of the launcher of this folder on this machine, or of the driver of this name; those of one
    that died before are ended."""

    def __init__(self, run: Run, options: Kubernetes) -> None:
        self.run, self.options = run, options
        config = read_record(run.job_dir).config
        self.kubectl = Kubectl(options.kubectl, options.namespace)
        machine = f"{socket.gethostname()}:{run.job_dir.resolve()}"
        here = f"{options.name}:{os.path.relpath(run.job_dir)}" if options.name else machine
        self._mine = {LAUNCHER: hashlib.sha256(here.encode()).hexdigest()[:16], SESSION: uuid.uuid4().hex[:8]}
        usual = Resources(USUAL["cpu"], USUAL["memory"])
        self._job = ClusterJob(
            name=options.name or object_name(config.name),
            image=options.image,
            job=run.job,
            trainers=config.trainers,
            pservers=config.pservers,
            coordinators=0,
            threads=config.threads,
            chunk_timeout=config.chunk_timeout,
            trainer=usual,
            pserver=usual,
            tls_secret=options.tls_secret,
            env=list({**run.environment, **options.env}.items()),
            env_from_secrets=options.env_from_secrets,
            volume=options.volume,
            pull_secret=options.pull_secret,
        )
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._pods: dict[str, PodProcess] = {}
        """By order: the newest."""
        self._cancelled = False
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
        if self._cancelled:
            raise EngineError("this engine starts nothing more", rule="engine", help="the launch ends")
        self.prepare()
        self._take_away(self._pods.get(order.name))
        name = f"{self._job.name}-{order.role}-{order.index}-{uuid.uuid4().hex[:5]}"
        self.kubectl.create(self._pod(order, name))
        made = PodProcess(self.kubectl, name, order)
        with self._lock:
            self._pods[order.name] = made
        return made

    def list(self) -> Sequence[Listed]:
        with self._lock:
            there = [p for p in self._pods.values() if p.poll() is None]
        return [Listed(p.order.role, p.order.index, p.place, "running" if p.running else "waiting") for p in there]

    def logs(self, order: Order, lines: int) -> Sequence[str]:
        pod = self._pods.get(order.name)
        try:
            return self.kubectl.logs(pod.name, lines) if pod is not None else []
        except EngineError:
            return []

    def step(self) -> None:
        """The thread does it."""

    def cancel_orders(self) -> None:
        self._cancelled = True
        for pod in [p for p in self._pods.values() if not p.running]:
            pod.send_signal(signal.SIGKILL)

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

    # -- pods ---------------------------------------------------------------------------------------------------

    def _pod(self, order: Order, name: str) -> Object:
        job = dataclasses.replace(self._job, etcd=order.etcd)
        template = role_pod(job, order.role, "", job.trainer, ["--index", str(order.index)])
        (container,) = template["spec"]["containers"]
        container["resources"] = resources(self.run.resources.get(order.role, {}))
        labels = {**template["metadata"]["labels"], **self._mine, ORDER: f"{order.role}-{order.index}"}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels, **_owner()},
            "spec": {**template["spec"], "restartPolicy": "Never"},
        }

    def _take_away(self, pod: PodProcess | None) -> None:
        """One that has ended, and is to be followed by another."""
        if pod is not None:
            self._keep_log(pod)
            self.kubectl.delete(pod.name)

    def _keep_log(self, pod: PodProcess) -> None:
        """What it wrote is appended to the run's log of this role."""
        try:
            lines = self.kubectl.logs(pod.name, -1)
            file = self.run.log(pod.order)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as out:
                out.writelines(f"{line}\n" for line in lines)
        except (EngineError, OSError):
            log.debug("the log of pod %s is lost", pod.name)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
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


def _owner() -> Object:
    """The driver's pod: the cluster takes its pods away with it."""
    name, uid = os.environ.get("GRAPHFT_POD"), os.environ.get("GRAPHFT_POD_UID")
    if not (name and uid):
        return {}
    return {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}]}


def resources(wanted: Mapping[str, float]) -> Object:
    """A container's, from numbers: all are requested, and all but the CPU are limits, too."""
    requests = {**USUAL, **{name: f"{amount:.15g}" for name, amount in wanted.items()}}
    return {"requests": requests, "limits": {name: amount for name, amount in requests.items() if name != "cpu"}}
