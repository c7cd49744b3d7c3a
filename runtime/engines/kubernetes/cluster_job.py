"""What the manifests of a job are made from: the job's own numbers, and what its user says of the cluster."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from graphft.errors import UsageError
from graphft.runtime.etcd.channel import parse_endpoint
from graphft.runtime.transport.address import WILDCARDS, is_loopback

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig

Object = dict[str, Any]
"""A Kubernetes object, or a part of one."""

MAX_NAME = 40
"""Labels have at most 63 characters; a StatefulSet's pods have one with a hash of 11 behind the name and its suffix."""
ETCD_PORT = 2379
GPU = "nvidia.com/gpu"
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one pod. `memory` is its limit, too; a pod may use more `cpu` than it asks for while nobody needs it."""

    cpu: str
    memory: str
    gpus: int = 0
    gpu: str = GPU
    """The name of the resource of which there are `gpus`."""

    def to_json(self) -> Object:
        gpus = {self.gpu: str(self.gpus)} if self.gpus else {}
        return {"requests": {"cpu": self.cpu, "memory": self.memory, **gpus}, "limits": {"memory": self.memory, **gpus}}


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """One job on one cluster."""

    name: str
    """Of its objects."""
    image: str
    job: str
    """What pods give to `graphft start --job`: the URL of the job's storage, or a folder in the volume."""
    trainers: int
    pservers: int
    coordinators: int
    threads: int
    """Of torch, in each role."""
    chunk_timeout: float
    """Seconds, the job's."""
    trainer: Resources
    pserver: Resources
    namespace: str = ""
    etcd: str = ""
    """Endpoints; "": members are deployed with the job."""
    etcd_members: int = 3
    etcd_image: str = ""
    etcd_storage: str = ""
    storage_class: str = ""
    tls_secret: str = ""
    env: Sequence[tuple[str, str]] = ()
    env_from_secrets: Sequence[str] = ()
    volume: tuple[str, str] | None = None
    """A PersistentVolumeClaim, and where pods have it."""
    pull_secret: str = ""
    max_failures: int = 20
    """Failures of trainers, all in all, after which the trainers' Job has failed."""

    @property
    def scheme(self) -> str:
        """Of the etcd that is deployed with the job."""
        return "https" if self.tls_secret else "http"

    @property
    def endpoints(self) -> str:
        """Of etcd, as pods reach it. Members have one name in common, that of their Service: which of them live, and
        where, changes; a client that was given three names would keep the addresses that these had at first."""
        return self.etcd or f"{self.scheme}://{self.name}-etcd:{ETCD_PORT}"

    def labels(self, component: str) -> dict[str, str]:
        """By which a component's pods are found."""
        return {"app.kubernetes.io/instance": self.name, "app.kubernetes.io/component": component}

    def metadata(self, component: str, suffix: str = "") -> Object:
        """Of an object of this component."""
        namespace = {"namespace": self.namespace} if self.namespace else {}
        labels = {"app.kubernetes.io/name": "graphft", **self.labels(component)}
        return {"name": f"{self.name}-{suffix or component}", **namespace, "labels": labels}


def object_name(job: str) -> str:
    """A name for the objects of this job, which may have letters and lengths that Kubernetes does not allow."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")
    if plain == job and len(plain) <= MAX_NAME and plain[0].isalpha():
        return plain
    digest = hashlib.sha256(job.encode()).hexdigest()[:6]
    start = plain if plain[:1].isalpha() else f"job-{plain}"
    return f"{start[: MAX_NAME - 7].strip('-')}-{digest}"


def check_name(name: str, option: str) -> None:
    """Raises UsageError for a name that objects cannot have."""
    if not _LABEL.fullmatch(name) or len(name) > MAX_NAME:
        raise UsageError(
            f"{name!r} is no name for objects of Kubernetes",
            rule="kubernetes",
            help=f"give {option}: at most {MAX_NAME} small letters, digits and '-', a letter first",
        )


def check_cluster(wanted: ClusterJob) -> None:
    """Raises UsageError for what could not be deployed, or not be reached."""
    check_name(wanted.name, "--name")
    if wanted.etcd_members % 2 == 0 or wanted.etcd_members < 1:
        raise UsageError(
            f"{wanted.etcd_members} members of etcd were asked for, expected an odd number",
            rule="kubernetes",
            help="give --etcd-members 3 (one may be away), or 1 to try it out",
        )
    hosts = {e: parse_endpoint(e).host for e in wanted.etcd.split(",")} if wanted.etcd else {}
    local = [e for e, host in hosts.items() if is_loopback(host) or host in WILDCARDS]
    if local:
        raise UsageError(
            f"etcd at {', '.join(local)} is out of reach: in a pod that is the pod itself",
            rule="kubernetes",
            help="give --etcd the address that pods reach it at",
        )


def check(config: JobConfig, wanted: ClusterJob) -> None:
    """Raises UsageError for what cannot work on a cluster."""
    if not config.ft:
        raise UsageError(
            f"job {config.name} has no fault tolerance, and a cluster moves pods",
            rule="kubernetes",
            help="transpile it with ft=True",
        )
    check_cluster(wanted)
    path = wanted.job.removeprefix("file://")
    if path != wanted.job and not (wanted.volume and PurePosixPath(path).is_relative_to(wanted.volume[1])):
        raise UsageError(
            f"{wanted.job} is on this machine's disk, where pods do not find it",
            rule="kubernetes",
            help="give the job a storage on the network, or --volume CLAIM:/PATH with that path",
        )
    if wanted.trainers < 1:
        raise UsageError(
            f"{wanted.trainers} trainers were asked for, expected at least 1",
            rule="kubernetes",
            help="give --trainers; those beyond the job's slots stand by",
        )
    least = int(config.dispatch == "coordinator")
    if wanted.coordinators < least:
        raise UsageError(
            f"{wanted.coordinators} coordinators were asked for, expected at least {least}",
            rule="kubernetes",
            help="give --coordinators 2, one of which stands by, or leave it out",
        )
