"""The etcd that is deployed with a job: members with a disk each, and the name under which clients reach them."""

from __future__ import annotations

from graphft.runtime.engines.kubernetes.budgets import at_most_one_away
from graphft.runtime.engines.kubernetes.cluster_job import ETCD_PORT, ClusterJob, Object, Resources
from graphft.runtime.engines.kubernetes.pods import TLS, locked_down, pod, probe, tls_mount, tls_volume

IMAGE = "gcr.io/etcd-development/etcd:v3.5.21"
PEER_PORT, METRICS_PORT = 2380, 2381
DATA = "/var/lib/etcd"
RESOURCES = Resources("250m", "1Gi")
STOP_SECONDS = 30


def etcd_objects(job: ClusterJob) -> list[Object]:
    return [_client_service(job), _peer_service(job), at_most_one_away(job, "etcd"), _members(job)]


def _client_service(job: ClusterJob) -> Object:
    """Of one address, behind which the members are that are ready."""
    ports = [{"name": "client", "port": ETCD_PORT, "targetPort": "client"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": job.metadata("etcd"),
        "spec": {"selector": job.labels("etcd"), "ports": ports},
    }


def _peer_service(job: ClusterJob) -> Object:
    """Gives each member a name. Members find each other before they are ready: that takes a majority of them."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": job.metadata("etcd", "etcd-peer"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": job.labels("etcd"),
            "ports": [{"name": "peer", "port": PEER_PORT}],
        },
    }


def _members(job: ClusterJob) -> Object:
    container = {
        "name": "etcd",
        "image": job.etcd_image or IMAGE,
        "command": ["/usr/local/bin/etcd"],
        "args": _arguments(job),
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [
            {"name": "client", "containerPort": ETCD_PORT},
            {"name": "peer", "containerPort": PEER_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        # A member that has no majority or no space is not better for being started again.
        "startupProbe": probe("/health?serializable=true&exclude=NOSPACE", "metrics", 5, 60),
        "livenessProbe": probe("/health?serializable=true&exclude=NOSPACE", "metrics", 10, 8),
        "readinessProbe": probe("/health?exclude=NOSPACE", "metrics", 5, 3),
        "resources": RESOURCES.to_json(),
        "securityContext": locked_down(),
        "volumeMounts": [{"name": "data", "mountPath": DATA}, *tls_mount(job)],
    }
    storage_class = {"storageClassName": job.storage_class} if job.storage_class else {}
    claim = {
        "metadata": {"name": "data", "labels": job.labels("etcd")},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            **storage_class,
            "resources": {"requests": {"storage": job.etcd_storage}},
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": job.metadata("etcd"),
        "spec": {
            "serviceName": f"{job.name}-etcd-peer",
            "replicas": job.etcd_members,
            "podManagementPolicy": "Parallel",
            "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
            "selector": {"matchLabels": job.labels("etcd")},
            "template": pod(job, "etcd", container, tls_volume(job), STOP_SECONDS),
            "volumeClaimTemplates": [claim],
        },
    }


def _arguments(job: ClusterJob) -> list[str]:
    scheme, peers = job.scheme, f"{job.name}-etcd-peer"
    members = [f"{job.name}-etcd-{n}" for n in range(job.etcd_members)]
    return [
        "--name=$(POD_NAME)",
        f"--data-dir={DATA}/data",
        f"--listen-client-urls={scheme}://0.0.0.0:{ETCD_PORT}",
        f"--advertise-client-urls={scheme}://$(POD_NAME).{peers}:{ETCD_PORT}",
        f"--listen-peer-urls={scheme}://0.0.0.0:{PEER_PORT}",
        f"--initial-advertise-peer-urls={scheme}://$(POD_NAME).{peers}:{PEER_PORT}",
        f"--listen-metrics-urls=http://0.0.0.0:{METRICS_PORT}",
        f"--initial-cluster={','.join(f'{m}={scheme}://{m}.{peers}:{PEER_PORT}' for m in members)}",
        f"--initial-cluster-token={job.name}",
        "--initial-cluster-state=new",
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=5m",
        *(_tls("") + _tls("peer-") if job.tls_secret else []),
    ]


def _tls(prefix: str) -> list[str]:
    """Both ends show a certificate of the same authority."""
    files = {"cert-file": "tls.crt", "key-file": "tls.key", "trusted-ca-file": "ca.crt"}
    return [*(f"--{prefix}{option}={TLS}/{file}" for option, file in files.items()), f"--{prefix}client-cert-auth"]
