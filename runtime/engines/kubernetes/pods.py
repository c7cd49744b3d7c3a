"""The pod of a role: what it runs, how it is asked whether it lives, what it may do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from graphft.runtime.engines.kubernetes.cluster_job import ClusterJob, Object, Resources
from graphft.runtime.process.role_environment import role_environment

HEALTH_PORT = 8080
WORK = "/workspace"
"""The working directory of roles: the copy of the job's folder is below it, and lasts as long as the pod."""
TMP = "/tmp"
TLS = "/etc/graphft/etcd"
TLS_VARIABLES = {"GRAPHFT_ETCD_CA": "ca.crt", "GRAPHFT_ETCD_CERT": "tls.crt", "GRAPHFT_ETCD_KEY": "tls.key"}
"""Files of the Secret."""
SCRIPT = "/etc/graphft/script"
OWN_VARIABLES = (
    *("POD_INDEX", "GRAPHFT_HOST", "GRAPHFT_POD", "GRAPHFT_POD_UID"),
    *("GRAPHFT_ENGINE", "GRAPHFT_ETCD", "GRAPHFT_IMAGE", "GRAPHFT_KUBERNETES"),
)
"""Differ from pod to pod. Others that are set here, --env may replace."""
USER = 10001
LEFT = 143
"""Exit status of a role that was asked to go, as of a process that SIGTERM ends: 0 is for a job that is complete."""
START_SECONDS, PROBE_SECONDS, ANSWER_SECONDS = 300, 10, 5
STOP_SECONDS = 30
"""What a role needs to end beyond the step that it is at."""


def role_pod(job: ClusterJob, role: str, index: str, resources: Resources, options: Sequence[str]) -> Object:
    """The template of a role's pods. `index`: the path of the pod's own field that holds it, "" for none."""
    arguments = ["start", role, "--job", literal(job.job), "--etcd", literal(job.endpoints)]
    arguments += ["--health", f"0.0.0.0:{HEALTH_PORT}"]
    own = [field("POD_INDEX", index)] if index else []
    command = ["graphft", *arguments, *(["--index", "$(POD_INDEX)"] if index else []), *options]
    container = {
        **container_of(job, role, command, own, resources),
        "ports": [{"name": "health", "containerPort": HEALTH_PORT}],
        **_probes(job),
    }
    return pod(job, role, container, volumes(job), math.ceil(job.chunk_timeout) + STOP_SECONDS)


def container_of(
    job: ClusterJob, name: str, command: Sequence[str], own: Sequence[Object], resources: Resources
) -> Object:
    """`own`: its variables that are fields of its pod."""
    secrets = {"envFrom": [{"secretRef": {"name": s}} for s in job.env_from_secrets]} if job.env_from_secrets else {}
    return {
        "name": name,
        "image": job.image,
        "command": [command[0]],
        "args": [*command[1:]],
        "workingDir": WORK,
        "env": [*own, *environment(job)],
        **secrets,
        "resources": resources.to_json(),
        "securityContext": locked_down(),
        "volumeMounts": mounts(job),
    }


def pod(job: ClusterJob, component: str, container: Object, volumes: list[Object], grace: int) -> Object:
    """A template with one container. `grace`: seconds between SIGTERM and SIGKILL."""
    labels = {"app.kubernetes.io/name": "graphft", **job.labels(component)}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": job.labels(component)},
    }
    return {
        "metadata": {"labels": labels},
        "spec": {
            **({"imagePullSecrets": [{"name": job.pull_secret}]} if job.pull_secret else {}),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [spread],
            "containers": [container],
            "volumes": volumes,
        },
    }


def locked_down() -> Object:
    """The securityContext of every container."""
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def tls_volume(job: ClusterJob) -> list[Object]:
    secret = {"secretName": job.tls_secret, "defaultMode": 0o440}
    return [{"name": "etcd-tls", "secret": secret}] if job.tls_secret else []


def tls_mount(job: ClusterJob) -> list[Object]:
    return [{"name": "etcd-tls", "mountPath": TLS, "readOnly": True}] if job.tls_secret else []


def probe(path: str, port: int | str, period: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": ANSWER_SECONDS,
        "failureThreshold": failures,
    }


def literal(text: str) -> str:
    """As a container's arguments and variables have it: `$(NAME)` is replaced there, and `$$` is a `$`."""
    return text.replace("$", "$$")


def field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def environment(job: ClusterJob) -> list[Object]:
    """GRAPHFT_HOST is the pod's address, not its name: that of a new pod takes a while to be known everywhere."""
    tls = TLS_VARIABLES if job.tls_secret else {}
    values = {
        "HOME": WORK,
        "USER": "graphft",
        **role_environment(),
        "OMP_NUM_THREADS": str(job.threads),
        **{name: f"{TLS}/{file}" for name, file in tls.items()},
        **dict(job.env),
    }
    return [field("GRAPHFT_HOST", "status.podIP"), *({"name": n, "value": literal(v)} for n, v in values.items())]


def _probes(job: ClusterJob) -> Object:
    """A role that does not get on ends itself after 0.9 of `chunk_timeout`, and so long its code may hold the
    interpreter's lock, when it answers nobody: the kubelet has more patience."""
    patience = math.ceil(job.chunk_timeout / PROBE_SECONDS) + 2
    return {
        "startupProbe": probe("/healthz", "health", ANSWER_SECONDS, START_SECONDS // ANSWER_SECONDS),
        "livenessProbe": probe("/healthz", "health", PROBE_SECONDS, patience),
        "readinessProbe": probe("/readyz", "health", ANSWER_SECONDS, 3),
    }


def mounts(job: ClusterJob) -> list[Object]:
    folders = [{"name": "work", "mountPath": WORK}, {"name": "tmp", "mountPath": TMP}]
    claim = [{"name": "job", "mountPath": job.volume[1]}] if job.volume else []
    return [*folders, *claim, *tls_mount(job)]


def volumes(job: ClusterJob) -> list[Object]:
    folders: list[Object] = [{"name": "work", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
    claim = [{"name": "job", "persistentVolumeClaim": {"claimName": job.volume[0]}}] if job.volume else []
    return [*folders, *claim, *tls_volume(job)]
