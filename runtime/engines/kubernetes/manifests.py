"""The manifests of a job: `job.yaml`, filled in, and the pods in it, `pod.yaml`."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graphft.errors import UsageError
from graphft.runtime.engines.template import fill
from graphft.runtime.process.role_process import role_environment

JOB, POD = (Path(__file__).with_name(name) for name in ("job.yaml", "pod.yaml"))
MAX_NAME = 40
"""Labels have at most 63 characters; a StatefulSet's pods have one with a hash of 11 behind the name and its suffix."""
LEFT = 143
"""Exit status of a role that was asked to go, as of a process that SIGTERM ends: 0 is for a job that is complete."""
STOP_SECONDS = 30
"""A role needs so long to end beyond the step that it is at."""
DRIVER_STOP_SECONDS = 120
"""A script's pod has so long after SIGTERM: its roles end their step, and write a checkpoint."""
USUAL = {"cpu": "1", "memory": "4Gi"}
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_ITS_OWN = frozenset(re.findall(r"- \{name: ([A-Z_]+),", POD.read_text(encoding="utf-8")))
_INDEX = {
    "trainer": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
    "pserver": "metadata.labels['apps.kubernetes.io/pod-index']",
}
"""The field of a controller's pod that holds its index."""


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods of a job: what they have in common. `name`: of the job's objects. `volume`: a PersistentVolumeClaim, and
    where pods have it. `threads`, `chunk_timeout`: the job's; 0 seconds for the pod of a script."""

    name: str
    image: str
    endpoints: str = ""
    tls_secret: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    env_from_secrets: Sequence[str] = ()
    volume: Sequence[str] | None = None
    pull_secret: str = ""
    threads: int = 1
    chunk_timeout: float = 0.0

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.name) or len(self.name) > MAX_NAME:
            raise UsageError(
                f"{self.name!r} is no name for objects of Kubernetes",
                rule="kubernetes",
                help=f"give --name (name=): at most {MAX_NAME} small letters, digits and '-', a letter first",
            )
        for name in _ITS_OWN & self.env.keys():
            raise UsageError(
                f"--env {name} is set already: each pod has its own", rule="option", help=f"leave out --env {name}"
            )

    def role(self, role: str, job: str, resources: Mapping[str, str], index: int | None = None, **own: object) -> str:
        """The pod of a role. `index`: None if a controller gives it one. `own`: values of a pod without controller."""
        options = {"trainer": ["--leave-status", str(LEFT)], "pserver": ["--stay"], "coordinator": ["--stay"]}
        field, numbered = ("", str(index)) if index is not None else (_INDEX.get(role, ""), "$(POD_INDEX)")
        command = ["graphft", "start", role, "--job", literal(job), "--etcd", literal(self.endpoints)]
        command += ["--health", "0.0.0.0:8080"]
        command += ["--index", numbered] if field or index is not None else []
        command += options[role] if index is None else []
        values = {
            "restart": "Never" if role == "trainer" or index is not None else "Always",
            "grace": math.ceil(self.chunk_timeout) + STOP_SECONDS,
            "patience": math.ceil(self.chunk_timeout / 10) + 2,
        }
        return self._pod(role, command, resources, index=field, **values, **own)

    def script(self, program: Sequence[str], resources: Mapping[str, str]) -> str:
        """The pod of a script that has its job's pods made like itself (`engine.py`)."""
        given = {
            "name": self.name,
            "env": dict(self.env),
            "env_from_secrets": list(self.env_from_secrets),
            "tls_secret": self.tls_secret,
            "pull_secret": self.pull_secret,
            "volume": self.volume,
        }
        driver = json.dumps(literal(json.dumps({name: value for name, value in given.items() if value})))
        command = ["python", *map(literal, program)]
        return self._pod("driver", command, resources, restart="Never", grace=DRIVER_STOP_SECONDS, driver=driver)

    def _pod(self, role: str, command: Sequence[str], resources: Mapping[str, str], **own: object) -> str:
        limits = {name: amount for name, amount in resources.items() if name != "cpu"}
        env = {**role_environment(), "OMP_NUM_THREADS": str(self.threads), **self.env}
        claim, mount = map(json.dumps, self.volume or ("", ""))
        values: dict[str, object] = {
            "name": self.name,
            "role": role,
            "image": json.dumps(self.image),
            "endpoints": self.endpoints,
            "command": json.dumps(command),
            "resources": json.dumps({"requests": dict(resources), "limits": limits}),
            "env": _entries({"name": name, "value": literal(value)} for name, value in env.items()),
            "env_from": _entries({"secretRef": {"name": name}} for name in self.env_from_secrets),
            "pull_secret": self.pull_secret and json.dumps(self.pull_secret),
            "tls_secret": self.tls_secret and json.dumps(self.tls_secret),
            "claim": claim,
            "mount": mount if self.volume else "",
            "role_only": role != "driver",
        }
        none = dict.fromkeys(("pod", "labels", "owner", "driver", "index", "patience"), "")
        return fill(POD, {**none, **values, **own})


def manifests(pods: Pods, members: int, **values: object) -> str:
    """All objects, in an order in which they may be made. `members`: of an etcd that is deployed with the job, or 0;
    `values`: of `job.yaml`, those for a job or those for a script."""
    scheme, peers = "https" if pods.tls_secret else "http", f"{pods.name}-etcd-peer"
    names = [f"{pods.name}-etcd-{number}" for number in range(members)]
    none = dict.fromkeys(("trainers", "pservers", "coordinator", "several", "driver"), "")
    own = {
        "name": pods.name,
        "members": members,
        "scheme": scheme,
        "cluster": ",".join(f"{member}={scheme}://{member}.{peers}:2380" for member in names),
        "tls_secret": pods.tls_secret and json.dumps(pods.tls_secret),
        "pull_secret": pods.pull_secret and json.dumps(pods.pull_secret),
    }
    return fill(JOB, {**none, **own, **values})


def deployed_etcd(name: str, tls: bool) -> str:
    """The endpoint of an etcd that is deployed with the job. Its members have one name in common, that of their
    Service: which of them live, and where, changes; a client that was given three names would keep the addresses that
    these had at first."""
    return f"{'https' if tls else 'http'}://{name}-etcd:2379"


def object_name(job: str) -> str:
    """A name for the objects of this job, which may have letters and lengths that Kubernetes does not allow."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")
    if plain == job and len(plain) <= MAX_NAME and plain[0].isalpha():
        return plain
    digest = hashlib.sha256(job.encode()).hexdigest()[:6]
    start = plain if plain[:1].isalpha() else f"job-{plain}"
    return f"{start[: MAX_NAME - 7].strip('-')}-{digest}"


def literal(text: str) -> str:
    """Returns the text as a container's arguments and variables have it: `$(NAME)` is replaced there, and `$$` is a
    `$`."""
    return text.replace("$", "$$")


def _entries(items: Iterable[object]) -> str:
    """A list's lines."""
    return "\n".join(f"- {json.dumps(item, ensure_ascii=False)}" for item in items)
