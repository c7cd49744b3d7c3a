"""The manifests of a script that makes its pods itself: `graphft kubernetes train.py`, with a graphft.Trainer say.

The script runs in a pod, its driver, as it does on a machine of yours with GRAPHFT_ENGINE=kubernetes. A Job starts the
driver again: on another node, in an empty folder, it goes on from the storage that the script names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from graphft.errors import UsageError
from graphft.runtime.engines.kubernetes.cluster_job import ClusterJob, Object
from graphft.runtime.engines.kubernetes.etcd import etcd_objects
from graphft.runtime.engines.kubernetes.manifests import indexed_job, only_each_other
from graphft.runtime.engines.kubernetes.pods import LEFT, SCRIPT, WORK, container_of, field, literal, pod, volumes

LARGEST = 200_000
"""Bytes: `kubectl apply` keeps the whole ConfigMap, quoted, in an annotation of it, which may have 256 KiB."""
INTERRUPTED = 130
STOP_SECONDS = 120
"""What the driver has after SIGTERM: its roles end their step, and write a checkpoint."""
RULES = (
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "get", "list", "delete"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]},
)
"""What `kubectl.py` calls for. Newer versions of kubectl exec with a GET."""


def driver_manifests(job: ClusterJob, script: Path, arguments: Sequence[str] = ()) -> list[Object]:
    """All objects, in an order in which they may be made. `arguments`: the script's. Raises UsageError."""
    return [
        only_each_other(job),
        *([] if job.etcd else etcd_objects(job)),
        *_account(job),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": job.metadata("driver", "script"),
            "data": {script.name: _text(script)},
        },
        _driver(job, [f"{SCRIPT}/{script.name}", *arguments]),
    ]


def _account(job: ClusterJob) -> list[Object]:
    rbac, named = "rbac.authorization.k8s.io", f"{job.name}-driver"
    subject = {"kind": "ServiceAccount", "name": named, **({"namespace": job.namespace} if job.namespace else {})}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": job.metadata("driver")},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": job.metadata("driver"), "rules": [*RULES]},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": job.metadata("driver"),
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": named},
            "subjects": [subject],
        },
    ]


def _driver(job: ClusterJob, program: Sequence[str]) -> Object:
    own = [field("GRAPHFT_POD", "metadata.name"), field("GRAPHFT_POD_UID", "metadata.uid")]
    own += [{"name": n, "value": literal(v)} for n, v in _engine(job).items()]
    container = container_of(job, "driver", ["python", *map(literal, program)], own, job.trainer)
    container["volumeMounts"] += [{"name": "script", "mountPath": SCRIPT, "readOnly": True}]
    held = {"name": "script", "configMap": {"name": f"{job.name}-script"}}
    made = pod(job, "driver", container, [*volumes(job), held], STOP_SECONDS)
    made["spec"] |= {"serviceAccountName": f"{job.name}-driver", "automountServiceAccountToken": True}
    return indexed_job(job, "driver", 1, made, (LEFT, INTERRUPTED))


def _engine(job: ClusterJob) -> dict[str, str]:
    """Has the script start pods like its own (`engine.py`)."""
    options = {
        "name": job.name,
        "namespace": job.namespace,
        "env": dict(job.env),
        "env_from_secrets": list(job.env_from_secrets),
        "tls_secret": job.tls_secret,
        "pull_secret": job.pull_secret,
        "volume": job.volume,
    }
    given = {name: value for name, value in options.items() if value}
    known = {"GRAPHFT_ENGINE": "kubernetes", "GRAPHFT_IMAGE": job.image, "GRAPHFT_ETCD": job.endpoints}
    return {**known, "GRAPHFT_KUBERNETES": json.dumps(given)}


def _text(script: Path) -> str:
    if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", script.name):
        raise UsageError(
            f"{script.name!r} is no name for a file in a ConfigMap",
            rule="option",
            help="name the script with letters of ASCII, digits, '-', '_' and '.' only",
        )
    try:
        text = script.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{script} cannot be read as UTF-8: {error}", rule="option", help="name a Python script"
        ) from error
    if len(text.encode()) > LARGEST:
        raise UsageError(
            f"{script} has {len(text.encode())} bytes, expected {LARGEST} or fewer, which a ConfigMap can hold",
            rule="option",
            help=f"put it into the image, and give a script that runs it; its folder there is {WORK}",
        )
    return text
